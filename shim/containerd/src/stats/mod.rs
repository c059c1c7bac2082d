//! `Stats`: what a container's cgroup has used.
//!
//! containerd passes the message on as it is, and the kubelet reads it, so it has to be the type that Go's library of cgroups
//! fills: one for version 1, one for version 2. A controller that is not there leaves its part of the message unset.

mod keyed;
mod oom;
mod v1;
mod v2;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

pub(crate) use oom::OomWatch;
use protobuf::{Message, well_known_types::any::Any};

const ROOT: &str = "/sys/fs/cgroup";

/// Figures that could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatsError {
    /// Which cgroup the process is in.
    #[error("find the cgroup of process {pid}")]
    Membership {
        /// The process.
        pid: u32,
        /// Why not.
        source: io::Error,
    },
    /// The out-of-memory watch.
    #[error("watch for out-of-memory kills")]
    Oom(#[source] io::Error),
    /// The message.
    #[error("encode the figures")]
    Encode(#[from] protobuf::Error),
}

/// Where a process stands in the cgroup hierarchies.
#[derive(Debug, PartialEq, Eq)]
enum Membership {
    /// One directory per controller, `None` where the controller has no hierarchy.
    V1(Vec<(String, PathBuf)>),
    V2(PathBuf),
}

/// The figures of the cgroup that this process is in.
pub(crate) fn of_process(pid: u32) -> Result<Any, StatsError> {
    let (name, value) = match membership_of(pid)? {
        Membership::V1(controllers) => ("io.containerd.cgroups.v1.Metrics", v1::read(&controllers).write_to_bytes()?),
        Membership::V2(directory) => ("io.containerd.cgroups.v2.Metrics", v2::read(&directory).write_to_bytes()?),
    };
    Ok(Any { type_url: name.to_owned(), value, ..Default::default() })
}

fn membership_of(pid: u32) -> Result<Membership, StatsError> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|source| StatsError::Membership { pid, source })?;
    let unified = fs::metadata(Path::new(ROOT).join("cgroup.controllers")).is_ok();
    Ok(membership(Path::new(ROOT), &text, unified))
}

/// Reads /proc/PID/cgroup, see cgroups(7): `number:controllers:path`, the one of version 2 without controllers.
fn membership(root: &Path, text: &str, unified: bool) -> Membership {
    let mut controllers = Vec::new();
    let mut version_two = root.to_owned();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(names), Some(path)) = (fields.next(), fields.next()) else { continue };
        let below = path.trim_start_matches('/');
        match names {
            "" => version_two = root.join(below),
            // Each controller has a directory or link of its own name, also when several share a hierarchy.
            _ => controllers.extend(names.split(',').map(|name| (name.to_owned(), root.join(name).join(below)))),
        }
    }
    if unified { Membership::V2(version_two) } else { Membership::V1(controllers) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_in_their_lines() {
        let text = "4:memory:/k8s/a\n2:cpu,cpuacct:/k8s/a:b\n0::/k8s/u\n";
        let root = Path::new("/c");
        let Membership::V1(controllers) = membership(root, text, false) else { panic!("no version 1") };
        assert!(controllers.contains(&("cpuacct".into(), "/c/cpuacct/k8s/a:b".into())));
        assert!(controllers.contains(&("memory".into(), "/c/memory/k8s/a".into())));
        assert_eq!(membership(root, text, true), Membership::V2("/c/k8s/u".into()));
    }

    #[test]
    fn our_own_figures_can_be_had() {
        let any = of_process(std::process::id()).unwrap();
        assert!(any.type_url.starts_with("io.containerd.cgroups.v"));
        assert!(!any.value.is_empty());
    }
}
