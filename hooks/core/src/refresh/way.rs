//! Decides if the way to a bound file on the host may be followed again.
//!
//! The runtime followed the host path once, when the container started. A refresh follows the path
//! again, and a container or a user may have changed a folder of the path since. So a container
//! could be led to a file that no bind gives it. A way is accepted if root alone can have changed
//! it:
//!
//! * A symlink belongs to root and lies in a folder that root alone may write.
//! * The file's folder is unchanged since the container's start. Otherwise root alone may write
//!   every folder on the way to the new folder.
//!
//! The bits of the group cover ACLs: they are the mask of an ACL, acl(5). The sticky bit does not
//! help: it does not keep a user from making a name. Hard links need no rule: a container cannot
//! link a file of another mount (link(2), EXDEV).

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::evidence::FilePlace;
use crate::mount_table::{MountEntry, MountIndex, MountTable};
use crate::refresh::{Refused, RefusedReason};
use crate::text::below;

/// The accuracy of a process's start time: a tick of proc_pid_stat(5).
const START_ACCURACY: Duration = Duration::from_millis(10);

/// The permission of group and others to write.
const WRITABLE_FOR_OTHERS: u32 = 0o022;

/// A folder on the way to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WayFolder {
    /// The path by which the walk reached the folder.
    pub path: PathBuf,
    pub place: FilePlace,
    pub owner: u32,
    pub mode: u32,
    /// The time since 1970 at which the folder was made; `None` on a filesystem without birth
    /// times.
    pub born: Option<Duration>,
}

/// A look-up of a name in a folder of the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookUp {
    /// The index of the folder.
    pub folder: usize,
    pub name: OsString,
    pub found: Found,
}

/// The result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The folder with this index.
    Folder(usize),
    /// A symlink of this owner; the walk went on with its target.
    Link { owner: u32 },
    /// The file: the end of the way.
    File,
    /// A file that a mount covers.
    MountPoint,
    /// Nothing.
    Missing,
}

/// The way to a file, from `/` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    pub folders: Vec<WayFolder>,
    /// The look-ups, in their order.
    pub look_ups: Vec<LookUp>,
}

/// A folder that no container may be able to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReliedOn<'w> {
    pub folder: &'w WayFolder,
    /// The reason for a refusal if a container may write the folder.
    pub reason: RefusedReason,
    /// The index of the look-up that relies on the folder.
    look_up: usize,
}

impl Way {
    /// The folders that root alone must be able to write, after owners and modes were checked. A
    /// way to the folder of the container's start has none, unless the way has a symlink. `stale`
    /// is the mount that the container has, `started` the time since 1970 of its start.
    ///
    /// # Errors
    /// If users besides root may write a folder of the way.
    pub fn relied_on(
        &self,
        stale: &MountEntry,
        started: Option<Duration>,
    ) -> Result<Vec<ReliedOn<'_>>, Refused> {
        let mut relied_on = Vec::new();
        // The look-ups that led to each folder, since the last folder that is known from the start.
        let mut led_to: Vec<Vec<usize>> = vec![Vec::new(); self.folders.len()];
        // A symlink decides which folder comes next, wherever its target begins.
        let mut through_links = Vec::new();
        for (index, LookUp { folder, found, .. }) in self.look_ups.iter().enumerate() {
            match *found {
                Found::Folder(child) if self.folders[child].is_of_start(stale, started) => {
                    led_to[child].clear();
                    through_links.clear();
                }
                Found::Folder(child) => {
                    let mut led_here = led_to[*folder].clone();
                    led_here.push(index);
                    led_to[child] = led_here;
                }
                Found::Link { .. } => {
                    relied_on.push(self.relied_on_at(index, RefusedReason::LinkBelowWritableBind)?);
                    through_links.extend_from_slice(&led_to[*folder]);
                }
                Found::File | Found::MountPoint | Found::Missing => {}
            }
        }
        let last = self.look_ups.last().map_or(0, |last| last.folder);
        through_links.extend_from_slice(&led_to[last]);
        through_links.sort_unstable();
        through_links.dedup();
        for look_up in through_links {
            relied_on
                .push(self.relied_on_at(look_up, RefusedReason::OtherFolderBelowWritableBind)?);
        }
        Ok(relied_on)
    }

    /// Adds the look-up of a mount point in the folder at the end of the way. `None` if the way has
    /// a symlink or is not complete.
    #[must_use]
    pub fn to_mount_point(mut self, name: &OsStr) -> Option<Self> {
        let folder = self.folders.len().checked_sub(1)?;
        let mut look_ups = self.look_ups.iter();
        if !look_ups.all(|look_up| matches!(look_up.found, Found::Folder(_))) {
            return None;
        }
        self.look_ups.push(LookUp {
            folder,
            name: name.to_owned(),
            found: Found::MountPoint,
        });
        Some(self)
    }

    /// All folders of a way to a mount point: root alone must be able to write each of these
    /// folders. Unlike the mount of a file, a mount does not show the folder of its mount point. From
    /// its own mount namespace, a container can rename a folder that is a mount point on the host.
    ///
    /// # Errors
    /// If users besides root may write a folder of the way.
    pub fn all_relied_on(&self) -> Result<Vec<ReliedOn<'_>>, Refused> {
        let reason = RefusedReason::OtherFolderBelowWritableBind;
        let look_ups = 0..self.look_ups.len();
        look_ups
            .map(|look_up| self.relied_on_at(look_up, reason))
            .collect()
    }

    /// The refusal of a file that a mount covers.
    pub fn mount_point(&self) -> Option<Refused> {
        let mut look_ups = self.look_ups.iter();
        let found = look_ups.position(|look_up| look_up.found == Found::MountPoint)?;
        Some(Refused::new(RefusedReason::MountPoint, self.path_of(found)))
    }

    /// The refusal because a container may write the folder.
    pub fn refusal(&self, relied_on: &ReliedOn<'_>, reason: RefusedReason) -> Refused {
        Refused::new(reason, self.path_of(relied_on.look_up))
    }

    fn relied_on_at(&self, look_up: usize, reason: RefusedReason) -> Result<ReliedOn<'_>, Refused> {
        let LookUp { folder, found, .. } = &self.look_ups[look_up];
        let folder = &self.folders[*folder];
        let is_roots_alone = folder.owner == 0 && folder.mode & WRITABLE_FOR_OTHERS == 0;
        let refused = match found {
            Found::Link { owner } if *owner != 0 => RefusedReason::LinkOfUser,
            Found::Link { .. } if !is_roots_alone => RefusedReason::LinkInWritableFolder,
            _ if !is_roots_alone => RefusedReason::OtherFolderOfUser,
            _ => {
                return Ok(ReliedOn {
                    folder,
                    reason,
                    look_up,
                });
            }
        };
        Err(Refused::new(refused, self.path_of(look_up)))
    }

    fn path_of(&self, look_up: usize) -> PathBuf {
        let LookUp { folder, name, .. } = &self.look_ups[look_up];
        self.folders[*folder].path.join(name)
    }
}

impl WayFolder {
    /// True if the stale mount shows a file of this very folder.
    ///
    /// The root of a mount has the present path of its folder. Only a removed folder keeps its last
    /// path. Then the folder now at that path is the original folder if it is older than the
    /// container.
    fn is_of_start(&self, stale: &MountEntry, started: Option<Duration>) -> bool {
        let is_there =
            stale.device == self.place.device && stale.root.path.parent() == Some(&self.place.path);
        let is_older = match (self.born, started) {
            (Some(born), Some(started)) => born <= started.saturating_add(START_ACCURACY),
            _ => false,
        };
        is_there && (!stale.root.deleted || is_older)
    }
}

impl FilePlace {
    /// True if this file or folder is the other, or lies below.
    pub fn lies_in(&self, other: &Self) -> bool {
        self.device == other.device && crate::text::lies_in(&self.path, &other.path)
    }

    /// The part of this place after the root of a mount; `None` if the mount does not show it.
    pub(super) fn below(&self, mount: &MountEntry) -> Option<&Path> {
        if mount.device != self.device || mount.root.deleted {
            return None;
        }
        below(&self.path, &mount.root.path)
    }
}

// The containers that may write a folder of the host, by their mount tables or their specs.
//
// A container that may write a folder can lead a name in it elsewhere. That gives nothing to a
// container that has the file already: an agent with a writable `/` could reach every file without
// a refresh.

/// Limit of judged mounts of a container for a file. Each costs milliseconds if the mount table has
/// 65,536 mounts.
const MAX_JUDGED_MOUNTS: usize = 64;

/// True if a container with these mounts may write the folder, and has no access to the file.
/// `hidden` are the places that the container may write besides: the container may have unmounted
/// their mounts, and keep a folder open. `to_write`: read access to the file does not suffice.
pub fn can_lead(
    table: &MountTable,
    hidden: &[FilePlace],
    folder: &FilePlace,
    file: &FilePlace,
    to_write: bool,
) -> bool {
    let may_write = |mount: &MountEntry| !mount.is_read_only() && folder.below(mount).is_some();
    let is_hidden = hidden.iter().any(|place| folder.lies_in(place));
    (is_hidden || table.entries().iter().any(may_write)) && !has(table, file, to_write)
}

/// True if the container surely has the file. A container decides how many mounts give the file, so
/// only the newest are judged.
fn has(table: &MountTable, file: &FilePlace, to_write: bool) -> bool {
    let index = MountIndex::of(table);
    let mut judged = 0;
    for mount in table.entries().iter().rev() {
        let rest = file
            .below(mount)
            .filter(|_| !to_write || !mount.is_read_only());
        let Some(rest) = rest else { continue };
        if judged == MAX_JUDGED_MOUNTS {
            return false;
        }
        judged += 1;
        // The container sees the file if no mount hides the path: only the parents of this mount
        // lie on the way to the mount.
        let path = mount.mount_point.join(rest);
        let mut carrying = HashSet::from([mount.id]);
        let mut next = index.parent(mount);
        while let Some(parent) = next.filter(|parent| carrying.insert(parent.id)) {
            next = index.parent(parent);
        }
        let mut mounts = table.entries().iter();
        if mounts.all(|other| carrying.contains(&other.id) || !path.starts_with(&other.mount_point))
        {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod writers_tests {
    use super::*;
    use crate::mount_table::Device;

    fn container(mounts: &str) -> MountTable {
        let text = format!("1 0 0:9 / / rw - overlay o rw\n{mounts}");
        MountTable::from_mountinfo(text.as_bytes()).unwrap()
    }

    fn place(path: &str) -> FilePlace {
        FilePlace {
            device: Device { major: 8, minor: 1 },
            path: path.into(),
        }
    }

    /// A container stacks as many binds of its folder as its mount table may have.
    #[test]
    fn a_stack_of_many_mounts_is_judged_in_time() {
        let stacked = |id: u32| format!("{id} {} 8:1 /p/data /data rw - ext4 d rw\n", id - 1);
        let mounts: String = (2..30_000).map(stacked).collect();
        let container = container(&mounts);
        let folder = place("/p/data");
        assert!(!can_lead(
            &container,
            &[],
            &folder,
            &place("/p/data/conf"),
            false
        ));
        assert!(can_lead(&container, &[], &folder, &place("/p/conf"), false));
    }

    #[test]
    fn a_container_leads_only_to_files_that_it_does_not_have() {
        let data = "2 1 8:1 /p/data /data rw - ext4 d rw\n";
        let masked = format!("{data}3 2 0:40 / /data/secret rw - tmpfs t rw\n");
        let all = "2 1 8:1 / /host rw - ext4 d rw\n";
        let over = format!("{data}3 1 0:40 / /data rw - tmpfs t rw\n");
        for (mounts, file, to_write, can) in [
            (data, "/p/.env", false, true),
            (data, "/p/data/conf/.env", false, false),
            (data, "/p/data2/.env", false, true),
            (masked.as_str(), "/p/data/secret/.env", false, true),
            (masked.as_str(), "/p/data/conf/.env", false, false),
            (over.as_str(), "/p/data/conf/.env", false, true),
            (all, "/p/.env", true, false),
            (
                "2 1 8:1 /p/data /data ro - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d ro\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:2 /p/data /data rw - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data//deleted /data rw - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d rw\n3 1 8:1 /p /all ro - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d rw\n3 1 8:1 /p /all ro - ext4 d rw\n",
                "/p/.env",
                true,
                true,
            ),
        ] {
            assert_eq!(
                can_lead(
                    &container(mounts),
                    &[],
                    &place("/p/data"),
                    &place(file),
                    to_write
                ),
                can,
                "{mounts}{file}"
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test says what it expects")]
mod way_tests {
    use super::*;
    use crate::mount_table::{Device, MountTable};

    const DISK: Device = Device { major: 8, minor: 1 };
    const BORN: Duration = Duration::from_secs(5);

    fn folder(path: &str) -> WayFolder {
        let place = FilePlace {
            device: DISK,
            path: path.into(),
        };
        WayFolder {
            path: path.into(),
            place,
            owner: 0,
            mode: 0o40755,
            born: Some(BORN),
        }
    }

    fn look_up(folder: usize, name: &str, found: Found) -> LookUp {
        LookUp {
            folder,
            name: name.into(),
            found,
        }
    }

    /// `/srv/conf/app`
    fn plain() -> Way {
        Way {
            folders: ["/", "/srv", "/srv/conf"].map(folder).into(),
            look_ups: vec![
                look_up(0, "srv", Found::Folder(1)),
                look_up(1, "conf", Found::Folder(2)),
                look_up(2, "app", Found::File),
            ],
        }
    }

    /// `/etc/app`, and `/etc` has the symlink `app` to `/srv/app`.
    fn linked() -> Way {
        Way {
            folders: ["/", "/etc", "/srv"].map(folder).into(),
            look_ups: vec![
                look_up(0, "etc", Found::Folder(1)),
                look_up(1, "app", Found::Link { owner: 0 }),
                look_up(0, "srv", Found::Folder(2)),
                look_up(2, "app", Found::File),
            ],
        }
    }

    /// The mount of a container with this root.
    fn stale(root: &str) -> MountEntry {
        let line = format!("2 1 8:1 {root} /app rw - ext4 d rw\n");
        let table = MountTable::from_mountinfo(line.as_bytes()).unwrap();
        table.entries()[0].clone()
    }

    /// The looked-up paths with the reason for a refusal, or the refusal itself.
    fn relied_on(way: &Way, root: &str) -> Result<Vec<(String, RefusedReason)>, Refused> {
        relied_on_since(way, root, Some(BORN))
    }

    fn relied_on_since(
        way: &Way,
        root: &str,
        started: Option<Duration>,
    ) -> Result<Vec<(String, RefusedReason)>, Refused> {
        let relied_on = way.relied_on(&stale(root), started)?;
        Ok(described(way, &relied_on))
    }

    fn described(way: &Way, relied_on: &[ReliedOn<'_>]) -> Vec<(String, RefusedReason)> {
        let mut all = Vec::new();
        for it in relied_on {
            let refusal = way.refusal(it, it.reason);
            assert_eq!(refusal.path.parent(), Some(&*it.folder.path));
            all.push((refusal.path.display().to_string(), refusal.reason));
        }
        all
    }

    const LINK: RefusedReason = RefusedReason::LinkBelowWritableBind;
    const FOLDER: RefusedReason = RefusedReason::OtherFolderBelowWritableBind;

    #[test]
    fn the_folder_of_the_start_needs_no_way_and_another_folder_its_whole_way() {
        let whole = vec![
            ("/srv".to_owned(), FOLDER),
            ("/srv/conf".to_owned(), FOLDER),
        ];
        assert_eq!(relied_on(&plain(), "/srv/conf/app"), Ok(vec![]));
        assert_eq!(relied_on(&plain(), "/srv/old/app"), Ok(whole.clone()));
        let mut elsewhere = plain();
        elsewhere.folders[2].place.device.minor = 2;
        assert_eq!(relied_on(&elsewhere, "/srv/conf/app"), Ok(whole.clone()));
        // The way begins anew at a folder of the start.
        let last = whole[1..].to_vec();
        assert_eq!(relied_on(&plain(), "/srv/app"), Ok(last));
    }

    #[test]
    fn a_removed_folder_is_that_of_the_start_if_it_is_older() {
        let whole = Ok(vec![
            ("/srv".to_owned(), FOLDER),
            ("/srv/conf".to_owned(), FOLDER),
        ]);
        let since = |way: &Way, started| relied_on_since(way, "/srv/conf/app//deleted", started);
        assert_eq!(since(&plain(), Some(BORN)), Ok(vec![]));
        assert_eq!(since(&plain(), Some(BORN - START_ACCURACY)), Ok(vec![]));
        assert_eq!(since(&plain(), Some(BORN - START_ACCURACY * 2)), whole);
        assert_eq!(since(&plain(), None), whole);
        let mut without_birth = plain();
        without_birth.folders[2].born = None;
        assert_eq!(since(&without_birth, Some(BORN)), whole);
    }

    #[test]
    fn a_symlink_relies_on_its_folder_and_hides_no_other_folder() {
        let link = ("/etc/app".to_owned(), LINK);
        assert_eq!(relied_on(&linked(), "/srv/app"), Ok(vec![link.clone()]));
        let (etc, srv) = (("/etc".to_owned(), FOLDER), ("/srv".to_owned(), FOLDER));
        assert_eq!(relied_on(&linked(), "/other/app"), Ok(vec![link, etc, srv]));
    }

    #[test]
    fn users_besides_root_may_write_no_folder_that_a_way_relies_on() {
        for (owner, mode, is_roots) in [
            (0, 0o40755, true),
            (0, 0o40700, true),
            (0, 0o41755, true),
            (0, 0o40775, false),
            (0, 0o40757, false),
            (0, 0o41777, false),
            (1000, 0o40755, false),
            (1000, 0o40775, false),
        ] {
            let mut plain = plain();
            (plain.folders[1].owner, plain.folders[1].mode) = (owner, mode);
            let reason = relied_on(&plain, "/old/app").map_err(|it| (it.path, it.reason));
            let other = RefusedReason::OtherFolderOfUser;
            let expected = ("/srv/conf".into(), other);
            assert_eq!(reason.err(), (!is_roots).then_some(expected), "{mode:o}");
            assert!(relied_on(&plain, "/srv/conf/app").is_ok());

            let mut linked = linked();
            (linked.folders[1].owner, linked.folders[1].mode) = (owner, mode);
            let reason = relied_on(&linked, "/srv/app").map_err(|it| (it.path, it.reason));
            let expected = ("/etc/app".into(), RefusedReason::LinkInWritableFolder);
            assert_eq!(reason.err(), (!is_roots).then_some(expected), "{mode:o}");
        }
        let mut of_user = linked();
        of_user.look_ups[1].found = Found::Link { owner: 1000 };
        let refused = relied_on(&of_user, "/srv/app").unwrap_err();
        assert_eq!(refused.reason, RefusedReason::LinkOfUser);
    }

    #[test]
    fn a_mount_point_relies_on_all_its_folders() {
        let mut way = plain();
        assert_eq!(
            way.clone().to_mount_point("x".as_ref()),
            None,
            "not complete"
        );
        way.look_ups.pop();
        assert_eq!(way.mount_point(), None);
        let mut way = way.to_mount_point("disk".as_ref()).unwrap();
        let found = way.mount_point().unwrap();
        assert_eq!(found.reason, RefusedReason::MountPoint);
        assert_eq!(found.path, Path::new("/srv/conf/disk"));
        let all = ["/srv", "/srv/conf", "/srv/conf/disk"].map(|path| (path.to_owned(), FOLDER));
        let relied_on = way.all_relied_on().unwrap();
        assert_eq!(described(&way, &relied_on), all);
        way.folders[2].mode = 0o40777;
        let refused = way.all_relied_on().unwrap_err();
        assert_eq!(refused.reason, RefusedReason::OtherFolderOfUser);
        assert_eq!(refused.path, Path::new("/srv/conf/disk"));

        let mut link = linked();
        link.look_ups.pop();
        assert_eq!(link.to_mount_point("disk".as_ref()), None);
        let nothing = Way {
            folders: Vec::new(),
            look_ups: Vec::new(),
        };
        assert_eq!(nothing.to_mount_point("disk".as_ref()), None);
    }

    #[test]
    fn a_place_lies_in_a_folder_of_its_filesystem_and_below_a_mount_of_the_folder() {
        let place = |path: &str, minor| FilePlace {
            device: Device { major: 8, minor },
            path: path.into(),
        };
        let folder = place("/a/b", 1);
        for (path, minor, is_in) in [
            ("/a/b", 1, true),
            ("/a/b/c", 1, true),
            ("/a/bc", 1, false),
            ("/a", 1, false),
            ("/a/b", 2, false),
        ] {
            assert_eq!(place(path, minor).lies_in(&folder), is_in, "{path} {minor}");
        }
        let below = |minor, root| {
            let of = place("/a/b/c", minor);
            of.below(&stale(root)).map(Path::to_owned)
        };
        assert_eq!(below(1, "/a"), Some("b/c".into()));
        assert_eq!(below(1, "/x"), None);
        assert_eq!(below(2, "/a"), None);
        assert_eq!(below(1, "/a//deleted"), None);
        assert_eq!(below(2, "/a//deleted"), None);
    }
}
