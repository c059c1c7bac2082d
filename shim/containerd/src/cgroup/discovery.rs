//! The place of a process's cgroup: /proc/PID/cgroup has its path in each hierarchy, see
//! cgroups(7). The mount that shows the hierarchy must be found.
//!
//! A directory is valid only if its `cgroup.procs` lists the process. So the usual place below
//! /sys/fs/cgroup is tried first. The mount table, which has ten thousand lines on some nodes, is
//! read only if that fails: inside a container, as in kind, or with hierarchies mounted elsewhere.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::directory::Directory;
use super::hierarchies::{self, ROOT};
use super::mounts::CgroupMount;
use super::v1::Controllers;
use super::{CgroupError, CgroupHierarchy};

/// Finds the directories of a living process's cgroup.
pub(super) fn find(pid: u32) -> Result<CgroupHierarchy, CgroupError> {
    let text = read(format!("/proc/{pid}/cgroup").into())?;
    let memberships: Vec<Membership<'_>> = text.lines().filter_map(Membership::parse).collect();
    let search = Search {
        pid,
        mounts: OnceCell::new(),
    };
    let version = if is_unified(hierarchies::is_unified(Path::new(ROOT)), &memberships) {
        search.v2(&memberships)
    } else {
        search.v1(&memberships)
    };
    version?.ok_or(CgroupError::Nowhere { pid })
}

/// A line of /proc/PID/cgroup: `4:memory:/pods/a`, `2:cpu,cpuacct:/pods/a`, `0::/pods/a`.
#[derive(Debug, PartialEq, Eq)]
struct Membership<'a> {
    /// Empty for the unified hierarchy.
    controllers: &'a str,
    path: &'a str,
}

impl<'a> Membership<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(3, ':').skip(1);
        Some(Self {
            controllers: fields.next()?,
            path: fields.next()?,
        })
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|name| name == controller)
    }
}

/// Version 2 if the unified hierarchy is at the usual place, which is also the test of containerd
/// and runc, or if it has all the controllers. A node that mounts cgroup2 beside hierarchies of
/// version 1 (hybrid) counts as version 1.
fn is_unified(at_the_usual_place: bool, memberships: &[Membership<'_>]) -> bool {
    let is_read =
        |membership: &Membership<'_>| Controllers::NAMES.iter().any(|name| membership.has(name));
    at_the_usual_place || !memberships.iter().any(is_read)
}

struct Search {
    pid: u32,
    /// Read at the first use.
    mounts: OnceCell<Vec<CgroupMount>>,
}

impl Search {
    fn v1(&self, memberships: &[Membership<'_>]) -> Result<Option<CgroupHierarchy>, CgroupError> {
        let mut controllers = Controllers::default();
        for name in Controllers::NAMES {
            let Some(membership) = memberships.iter().find(|membership| membership.has(name))
            else {
                continue;
            };
            if let Some(directory) = self.directory(Some(name), membership.path)? {
                controllers.put(name, directory);
            }
        }
        Ok((controllers != Controllers::default()).then_some(CgroupHierarchy::V1(controllers)))
    }

    fn v2(&self, memberships: &[Membership<'_>]) -> Result<Option<CgroupHierarchy>, CgroupError> {
        let Some(unified) = memberships
            .iter()
            .find(|membership| membership.controllers.is_empty())
        else {
            return Ok(None);
        };
        Ok(self.directory(None, unified.path)?.map(CgroupHierarchy::V2))
    }

    /// The directory in the hierarchy of a controller, or in the unified hierarchy.
    fn directory(
        &self,
        controller: Option<&str>,
        path: &str,
    ) -> Result<Option<Directory>, CgroupError> {
        // Controllers that share a hierarchy have a link each: /sys/fs/cgroup/cpu is cpu,cpuacct.
        let usual = Path::new(ROOT)
            .join(controller.unwrap_or(""))
            .join(path.trim_start_matches('/'));
        if self.is_in(&usual) {
            return Ok(Some(Directory::at(usual)));
        }
        let shown = self
            .mounts()?
            .iter()
            .filter(|mount| mount.shows(controller));
        let found = shown
            .filter_map(|mount| mount.directory_of(path))
            .find(|directory| self.is_in(directory));
        Ok(found.map(Directory::at))
    }

    /// True if the directory lists the process.
    fn is_in(&self, directory: &Path) -> bool {
        let Ok(procs) = fs::read_to_string(directory.join("cgroup.procs")) else {
            return false;
        };
        procs.lines().any(|line| line.parse() == Ok(self.pid))
    }

    fn mounts(&self) -> Result<&[CgroupMount], CgroupError> {
        if let Some(mounts) = self.mounts.get() {
            return Ok(mounts);
        }
        let path = Path::new("/proc/thread-self/mountinfo");
        let mounts =
            File::open(path).and_then(|table| CgroupMount::read_all(BufReader::new(table)));
        let mounts = mounts.map_err(|source| CgroupError::Read {
            path: path.to_owned(),
            source,
        })?;
        Ok(self.mounts.get_or_init(|| mounts))
    }
}

fn read(path: PathBuf) -> Result<String, CgroupError> {
    match fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(source) => Err(CgroupError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memberships(text: &str) -> Vec<Membership<'_>> {
        text.lines().filter_map(Membership::parse).collect()
    }

    #[test]
    fn lines_name_controllers_and_path() {
        let lines = memberships("2:cpu,cpuacct:/pods/a:b\n9:name=systemd:/\n0::/x\nodd\n");
        assert_eq!(lines.len(), 3);
        assert!(lines[0].has("cpuacct") && !lines[0].has("cpuac"));
        assert_eq!(
            (lines[0].path, lines[2].controllers, lines[2].path),
            ("/pods/a:b", "", "/x")
        );
    }

    #[test]
    fn a_hybrid_node_is_version_1() {
        assert!(!is_unified(
            false,
            &memberships("4:memory:/a\n9:name=systemd:/\n0::/a\n")
        ));
        assert!(is_unified(false, &memberships("9:name=systemd:/\n0::/a\n")));
        // net_cls, or even pids, is mounted as version 1 on a node that is otherwise version 2.
        assert!(is_unified(true, &memberships("3:pids:/\n0::/a\n")));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error_that_names_its_file() {
        let error = find(u32::MAX).unwrap_err();
        assert_eq!(error.to_string(), format!("read /proc/{}/cgroup", u32::MAX));
    }

    #[test]
    fn our_own_cgroup_is_also_found_by_the_mount_table() {
        let search = Search {
            pid: std::process::id(),
            mounts: OnceCell::new(),
        };
        let text = read("/proc/self/cgroup".into()).unwrap();
        for membership in memberships(&text) {
            let controller = membership
                .controllers
                .split(',')
                .next()
                .filter(|name| !name.is_empty());
            let mut shown = search
                .mounts()
                .unwrap()
                .iter()
                .filter(|mount| mount.shows(controller));
            let is_found = shown.any(|mount| {
                mount
                    .directory_of(membership.path)
                    .is_some_and(|at| search.is_in(&at))
            });
            if !is_found {
                eprintln!(
                    "SKIPPED: the hierarchy {:?} is not mounted here",
                    membership.controllers
                );
            }
            if controller == Some("memory") {
                assert!(is_found);
            }
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read_without_panic(text: String) {
            let _ = is_unified(false, &memberships(&text));
        }
    }
}
