//! The record of a node in a support bundle: the mount table, and a copy of the node's files below
//! a directory.
//!
//! A copy usually has no secrets. If the volume is missing from the copy, a deleted root is still
//! certain: nothing can be bound from it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
    VolumeMount,
};
use bindguard_core::judge::{Fit, PathInVolume};
use bindguard_core::kubelet::{
    DATA_LINK, MountedVolume, Plugin, TimestampDirectory, VolumeLayout, VolumeSubpath,
};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::paths::{below, join};
use bindguard_core::places::Places;

use crate::other_roots::place_in;

/// A kubelet root of a recorded node.
#[derive(Debug)]
pub struct RecordedRoot {
    /// Its name in the config.
    pub named: PathBuf,
    /// Its name in the mount table and in the copy: a folder of the name may be a symlink.
    pub real: PathBuf,
}

/// The kubelet roots of a recorded node, each directory once.
pub fn recorded_roots(places: &Places, table: &MountTable, root: &Path) -> Vec<RecordedRoot> {
    let mut roots: Vec<RecordedRoot> = Vec::new();
    for named in places.kubelet_roots() {
        let real = resolved_in(root, named);
        let place = place_in(table, &real);
        let is_known = |known: &RecordedRoot| {
            known.real == real || place.is_some() && place_in(table, &known.real) == place
        };
        if !roots.iter().any(is_known) {
            let named = named.to_owned();
            roots.push(RecordedRoot { named, real });
        }
    }
    roots
}

/// The path to which `path` leads with `root` as `/`. A symlink of the copy must not lead to a file
/// of the reader's own node.
fn resolved_in(root: &Path, path: &Path) -> PathBuf {
    const MAX_LINKS: usize = 40;
    let names = |path: &Path| -> Vec<OsString> {
        let names = path.components().map(|name| name.as_os_str().to_owned());
        names.rev().collect()
    };
    let (mut done, mut left, mut links) = (PathBuf::from("/"), names(path), 0);
    while let Some(name) = left.pop() {
        match Path::new(&name).components().next() {
            Some(Component::RootDir) => done = PathBuf::from("/"),
            Some(Component::ParentDir) => drop(done.pop()),
            Some(Component::Normal(name)) => {
                let next = done.join(name);
                match fs::read_link(copy_below(root, &next)) {
                    Ok(target) if links < MAX_LINKS => {
                        links += 1;
                        left.extend(names(&target));
                    }
                    Ok(_) | Err(_) => done = next,
                }
            }
            Some(Component::CurDir | Component::Prefix(_)) | None => {}
        }
    }
    done
}

fn copy_below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A recorded node. Paths are the node's own.
#[derive(Debug)]
pub struct Recorded<'r> {
    table: MountIndex<'r>,
    roots: &'r [RecordedRoot],
    /// A skipped line may be a mount at any path, and on top of any other mount.
    skipped: Option<String>,
    root: &'r Path,
}

impl<'r> Recorded<'r> {
    /// The node with this mount table, which has the names of `roots`, whose `/` was copied to
    /// `root`.
    pub fn new(table: &'r MountTable, root: &'r Path, roots: &'r [RecordedRoot]) -> Self {
        Self {
            roots,
            table: MountIndex::of(table),
            skipped: table.skipped().map(ToString::to_string),
            root,
        }
    }

    /// The path that a file of the node has in the copy.
    pub fn copy_of(&self, path: &Path) -> PathBuf {
        for root in self.roots {
            if let Some(rest) = below(path, &root.named) {
                return copy_below(self.root, &join(root.real.clone(), rest));
            }
        }
        copy_below(self.root, path)
    }

    /// The recorded mount of a volume.
    pub fn volume_mount(&self, volume: &MountedVolume) -> Observed<VolumeMount> {
        if let Some(why) = &self.skipped {
            return Observed::Unreadable(why.clone());
        }
        match self.table.stack_at(volume.mount_point()).last() {
            Some(entry) => Observed::Seen(VolumeMount {
                fs_type: entry.fs_type.clone(),
                deleted: entry.root.deleted,
            }),
            None => Observed::Absent,
        }
    }

    /// The recorded evidence about a subpath.
    pub fn subpath(&self, subpath: &VolumeSubpath) -> SubpathEvidence {
        let path = subpath.path();
        let stack = self.table.stack_at(&path);
        let without_mount = |mount| SubpathEvidence {
            mount,
            reach: Reach::NotNeeded,
            volume: Observed::Absent,
            target: Observed::Absent,
        };
        if let Some(why) = &self.skipped {
            return without_mount(Observed::Unreadable(why.clone()));
        }
        let Some(entry) = stack.last() else {
            return without_mount(Observed::Absent);
        };
        let mut mount = SubpathMount {
            root: entry.root.clone(),
            device: entry.device,
            fs_type: entry.fs_type.clone(),
            identity: Observed::Seen(recorded_identity(FileKind::File)),
            covers_its_equal: stack.len() > 1,
        };
        let volume = self.volume(subpath, entry, &mount);
        let target = match &volume {
            Observed::Seen(volume) => self.target(&mount, volume),
            Observed::Absent | Observed::Unreadable(_) => Observed::Absent,
        };
        if let Observed::Seen(Target {
            file: Observed::Seen(file),
            ..
        }) = &target
        {
            // A copy does not show which file is mounted, only which file has the name.
            mount.identity = Observed::Seen(*file);
        }
        SubpathEvidence {
            mount: Observed::Seen(mount),
            reach: Reach::NotNeeded,
            volume,
            target,
        }
    }

    /// The volume with this name whose plugin fits best. A volume that is not in the copy is
    /// derived from the subpath's own mount.
    fn volume(
        &self,
        subpath: &VolumeSubpath,
        entry: &MountEntry,
        mount: &SubpathMount,
    ) -> Observed<Volume> {
        let copied = |plugin: &Plugin| {
            self.copy_of(&subpath.volume_directory(*plugin))
                .symlink_metadata()
                .is_ok()
        };
        let of_plugin = |plugin: Plugin| self.volume_of(plugin, subpath, entry);
        let mut volumes: Vec<_> = Plugin::all().filter(copied).map(of_plugin).collect();
        volumes.sort_by_key(|volume| match volume {
            Observed::Seen(volume) => Fit::of(mount, volume),
            Observed::Absent | Observed::Unreadable(_) => Fit::None,
        });
        let by_mount = || {
            Plugin::all()
                .find(|plugin| in_root(subpath, *plugin, entry).is_some())
                .map(of_plugin)
        };
        let nowhere = || Observed::Unreadable("the copy does not hold its volume".to_owned());
        match volumes
            .into_iter()
            .next()
            .or_else(by_mount)
            .unwrap_or_else(nowhere)
        {
            Observed::Seen(volume) => Observed::Seen(Volume {
                layout: self.layout(mount, &volume),
                ..volume
            }),
            other => other,
        }
    }

    fn volume_of(
        &self,
        plugin: Plugin,
        subpath: &VolumeSubpath,
        entry: &MountEntry,
    ) -> Observed<Volume> {
        let directory = subpath.volume_directory(plugin);
        let seen = |mount: &MountEntry, place: PathBuf, is_mount_point: bool| {
            let (device, fs_type) = (mount.device, mount.fs_type.clone());
            let (directory, layout) = (directory.clone(), plugin.layout());
            let is_newer = self.table.is_listed_after(mount, entry);
            Observed::Seen(Volume {
                plugin,
                directory,
                device,
                fs_type,
                place,
                is_mount_point,
                is_newer,
                layout,
            })
        };
        if let Some(own) = self.table.stack_at(&directory).last() {
            return seen(own, own.root.path.clone(), true);
        }
        let over = self.table.mount_over(&directory);
        match (
            over.and_then(|over| Some((over, over.place_in_filesystem(&directory)?))),
            in_root(subpath, plugin, entry),
        ) {
            (Some((over, place)), _) => seen(over, place, false),
            (None, Some(place)) => seen(entry, place, false),
            (None, None) => Observed::Unreadable(
                "the mount table does not hold the mount of its volume".to_owned(),
            ),
        }
    }

    /// The layout that the volume's writer made: see [`PathInVolume::begins_like_a_payload`].
    fn layout(&self, mount: &SubpathMount, volume: &Volume) -> VolumeLayout {
        let may_be_payload = PathInVolume::from_mount(mount, volume)
            .is_ok_and(|sub_path| sub_path.begins_like_a_payload());
        let link = || fs::read_link(self.copy_of(&volume.directory).join(DATA_LINK)).ok();
        let is_payload = may_be_payload
            && link().is_some_and(|to| TimestampDirectory::from_name(to.as_os_str()).is_some());
        if is_payload {
            VolumeLayout::Payload
        } else {
            volume.layout
        }
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        let Ok(sub_path) = PathInVolume::from_mount(mount, volume) else {
            return Observed::Absent;
        };
        let copy = self.copy_of(&volume.directory);
        let payload = match volume.layout {
            VolumeLayout::Plain => None,
            VolumeLayout::Payload => match fs::read_link(copy.join(DATA_LINK)) {
                Ok(link) => TimestampDirectory::from_name(link.as_os_str()),
                Err(error) => return missing_or(&error, &copy),
            },
        };
        let folder = payload
            .as_ref()
            .map_or_else(|| copy.clone(), |payload| copy.join(payload.name()));
        match folder.join(&sub_path.path).symlink_metadata() {
            Ok(metadata) => {
                let kind = if metadata.is_dir() {
                    FileKind::Directory
                } else {
                    FileKind::File
                };
                Observed::Seen(Target {
                    timestamp: payload,
                    file: Observed::Seen(recorded_identity(kind)),
                })
            }
            // If nothing of a payload was copied, its keys are unknown.
            Err(_) if fs::read_dir(&folder).is_err() => {
                missing_or(&io::ErrorKind::NotFound.into(), &folder)
            }
            Err(_) => Observed::Seen(Target {
                timestamp: payload,
                file: Observed::Absent,
            }),
        }
    }
}

fn missing_or<T>(error: &io::Error, copy: &Path) -> Observed<T> {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Observed::Unreadable(format!("the copy does not hold {}", copy.display()))
        }
        _ => Observed::Unreadable(format!("read {}: {error}", copy.display())),
    }
}

/// The volume's place according to the subpath's own mount: the root of that mount up to the
/// volume's name.
fn in_root(subpath: &VolumeSubpath, plugin: Plugin, entry: &MountEntry) -> Option<PathBuf> {
    let folder = format!(
        "/pods/{}/volumes/{plugin}/{}",
        subpath.pod_uid(),
        subpath.volume()
    );
    let root = entry.root.path.to_str()?;
    let at = root.find(&folder)?;
    Some(PathBuf::from(&root[..at + folder.len()]))
}

/// The identity of all files of a kind in a copy. The inodes of a copy differ from the node's, so
/// files with the same names are treated as the same file.
fn recorded_identity(kind: FileKind) -> FileIdentity {
    FileIdentity {
        device: 0,
        inode: 0,
        kind,
    }
}
