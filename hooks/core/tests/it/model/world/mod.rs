//! A volume, its kubelet, its containers and the kernel's mounts, as far as a subpath can notice
//! them.

mod event;
mod evidence;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bindguard_core::evidence::{FileIdentity, FileKind};
use bindguard_core::judge::PathInVolume;
use bindguard_core::kubelet::{Plugin, TimestampDirectory, Writer};

pub use event::{Event, Storage, Veiled};
use evidence::seen_on;

/// The device of the node's own disk.
const DISK: u32 = 1;

/// The path of a host folder that is a volume.
const ON_THE_HOST: &str = "srv/data";

/// A mount at the subpath.
#[derive(Debug, Clone)]
pub struct Bound {
    device: u32,
    root: PathBuf,
    pub file: FileIdentity,
    pub deleted: bool,
    /// A directory that the kubelet made because there was nothing to bind.
    pub is_placeholder: bool,
    /// The server no longer knows the mount's handle.
    is_forgotten: bool,
}

#[derive(Debug, Clone)]
pub struct World {
    plugin: Plugin,
    storage: Storage,
    is_mounted: bool,
    device: u32,
    /// The devices whose daemon or server no longer answers.
    dead: BTreeSet<u32>,
    data: Option<TimestampDirectory>,
    /// The files by their paths below the volume.
    files: BTreeMap<PathBuf, FileIdentity>,
    /// The mounts at the subpath, the topmost last.
    pub stack: Vec<Bound>,
    /// The pod's `subPath`; the guard never sees it.
    sub_path: PathBuf,
    kind: FileKind,
    veiled: Option<Veiled>,
    made: u32,
}

impl World {
    pub fn new(plugin: Plugin, storage: Storage, sub_path: &str, kind: FileKind) -> Self {
        let is_mounted = matches!(storage, Storage::Memory | Storage::Disk | Storage::Server);
        let device = if is_mounted { DISK + 1 } else { DISK };
        let (data, files, stack) = (None, BTreeMap::new(), Vec::new());
        let mut world = Self {
            plugin,
            storage,
            is_mounted,
            device,
            dead: BTreeSet::new(),
            data,
            files,
            stack,
            sub_path: sub_path.into(),
            kind,
            veiled: None,
            made: 10,
        };
        world.happen(Event::Update {
            with_key: true,
            strands_old: false,
        });
        world.happen(Event::Replace { other_kind: false });
        world
    }

    pub fn happen(&mut self, event: Event) {
        let is_kubelets = self.is_kubelets();
        match event {
            Event::Update {
                with_key,
                strands_old,
            } if is_kubelets && self.is_there() => {
                let old = self.data.clone();
                self.data = Some(self.write_payload(with_key));
                if let Some(old) = old.filter(|_| !strands_old) {
                    self.remove(Path::new(old.name()));
                }
            }
            Event::HalfUpdate if is_kubelets && self.is_there() => drop(self.write_payload(true)),
            Event::Replace { other_kind } if !is_kubelets && self.answers() => {
                self.remove(&self.sub_path.clone());
                let file = self.make(if other_kind {
                    opposite(self.kind)
                } else {
                    self.kind
                });
                self.files.insert(self.sub_path.clone(), file);
            }
            Event::Remake if is_kubelets && self.truth().is_some() => {
                let at = self.place_of_truth().expect("there is a truth");
                self.remove(&at);
                let file = self.make(self.kind);
                self.files.insert(at, file);
            }
            Event::Remove if !is_kubelets && self.answers() => self.remove(&self.sub_path.clone()),
            Event::Bind if self.stack.is_empty() && self.answers() => self.bind(),
            Event::Unbind => self.stack.clear(),
            Event::Unmount if self.is_mounted => {
                (self.is_mounted, self.device) = (false, DISK);
                if self.storage == Storage::Memory {
                    (self.files, self.data) = (BTreeMap::new(), None);
                }
            }
            Event::Mount if self.has_own_mount() && !self.is_mounted => {
                self.made += 1;
                (self.is_mounted, self.device) = (true, self.made);
            }
            Event::Die if self.storage == Storage::Server && self.is_mounted => {
                self.dead.insert(self.device);
            }
            Event::Forget if self.storage == Storage::Server => {
                self.stack
                    .last_mut()
                    .into_iter()
                    .for_each(|top| top.is_forgotten = true);
            }
            Event::Veil(veiled) => self.veiled = veiled,
            Event::Update { .. }
            | Event::HalfUpdate
            | Event::Replace { .. }
            | Event::Remake
            | Event::Remove => {}
            Event::Bind | Event::Unmount | Event::Mount | Event::Die | Event::Forget => {}
            Event::GuardKilled | Event::Create => {}
        }
    }

    /// The file that the kubelet would bind today for the pod's `subPath`.
    pub fn truth(&self) -> Option<FileIdentity> {
        self.files
            .get(&self.place_of_truth()?)
            .map(|file| seen_on(*file, self.device))
            .filter(|_| self.is_there())
    }

    /// The file that a container would see at the subpath.
    pub fn shown(&self) -> Option<FileIdentity> {
        self.stack.last().map(|top| seen_on(top.file, top.device))
    }

    pub fn is_kubelets(&self) -> bool {
        self.plugin.writer == Writer::Kubelet
    }

    pub fn is_veiled(&self) -> bool {
        self.veiled.is_some()
    }

    /// True if the volume is mounted as its plugin requires.
    pub fn is_there(&self) -> bool {
        self.is_mounted == self.has_own_mount()
    }

    /// True if the volume is mounted, and its daemon or server answers.
    pub fn answers(&self) -> bool {
        self.is_there() && !self.is_dead(self.device)
    }

    /// True if the topmost mount answers every call with an error.
    pub fn shows_dead_mount(&self) -> bool {
        self.stack
            .last()
            .is_some_and(|top| top.is_forgotten || self.is_dead(top.device))
    }

    pub fn is_of_the_host(&self) -> bool {
        self.storage == Storage::Host
    }

    /// open_tree and move_mount: the current target of a sub path, directly below the topmost
    /// mount.
    pub fn attach_beneath(&mut self, sub_path: &PathInVolume) {
        let at = self
            .place_of(&self.in_volume(sub_path))
            .expect("a target was seen");
        let file = *self.files.get(&at).expect("a target was seen");
        assert_eq!(
            self.stack.last().map(|top| top.file.kind),
            Some(file.kind),
            "the kernel says ENOTDIR"
        );
        let root = self.place().join(at);
        let new = Bound {
            root,
            file,
            is_placeholder: false,
            ..self.bound_now()
        };
        self.stack.insert(self.stack.len() - 1, new);
    }

    /// umount2 of the topmost mount.
    pub fn detach(&mut self) {
        self.stack.pop();
    }

    /// mkdir, below the volume's root.
    pub fn make_directory(&mut self, sub_path: &PathInVolume) {
        let file = self.make(FileKind::Directory);
        self.files.insert(self.in_volume(sub_path), file);
    }

    fn bind(&mut self) {
        let is_placeholder = self.truth().is_none();
        if is_placeholder {
            // subpath_linux.go makes a directory of the key's name in the volume itself.
            let made = self.make(FileKind::Directory);
            self.files.entry(self.sub_path.clone()).or_insert(made);
        }
        let at = self
            .place_of_truth()
            .filter(|at| self.files.contains_key(at))
            .unwrap_or(self.sub_path.clone());
        let file = self.files[&at];
        let root = self.place().join(at);
        self.stack.push(Bound {
            root,
            file,
            is_placeholder,
            ..self.bound_now()
        });
    }

    fn bound_now(&self) -> Bound {
        let file = FileIdentity {
            device: 0,
            inode: 0,
            kind: self.kind,
        };
        Bound {
            device: self.device,
            root: PathBuf::new(),
            file,
            deleted: false,
            is_placeholder: false,
            is_forgotten: false,
        }
    }

    fn write_payload(&mut self, with_key: bool) -> TimestampDirectory {
        self.made += 1;
        let name = format!("..2026_11_21_05_10_00.{}", self.made);
        let timestamp = TimestampDirectory::from_name(name.as_ref()).expect("it is AtomicWriter's");
        if with_key {
            let file = self.make(self.kind);
            self.files
                .insert(Path::new(&name).join(&self.sub_path), file);
        }
        timestamp
    }

    fn remove(&mut self, path: &Path) {
        let gone: Vec<FileIdentity> = self
            .files
            .iter()
            .filter(|(at, _)| at.starts_with(path))
            .map(|(_, file)| *file)
            .collect();
        self.files.retain(|at, _| !at.starts_with(path));
        // The kernel of this node does not notice a removal on the server.
        let is_noticed = self.storage != Storage::Server;
        self.stack
            .iter_mut()
            .filter(|bound| gone.contains(&bound.file))
            .for_each(|bound| bound.deleted = is_noticed);
    }

    fn make(&mut self, kind: FileKind) -> FileIdentity {
        self.made += 1;
        FileIdentity {
            device: 0,
            inode: u64::from(self.made),
            kind,
        }
    }

    fn place_of_truth(&self) -> Option<PathBuf> {
        self.place_of(&self.sub_path)
    }

    fn place_of(&self, path: &Path) -> Option<PathBuf> {
        match self.plugin.writer {
            Writer::Kubelet => Some(Path::new(self.data.as_ref()?.name()).join(path)),
            Writer::Containers => Some(path.to_owned()),
        }
    }

    fn place(&self) -> PathBuf {
        match self.storage {
            _ if self.is_mounted => "/".into(),
            Storage::Host => Path::new("/").join(ON_THE_HOST),
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server => {
                "/var/lib/kubelet/pods/u/volumes/v".into()
            }
        }
    }

    /// A sub path of the host's disk leads through the folder that is the volume.
    fn in_volume(&self, sub_path: &PathInVolume) -> PathBuf {
        match self.storage {
            Storage::Host => sub_path
                .path
                .strip_prefix(ON_THE_HOST)
                .expect("it was bound from there")
                .to_owned(),
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server => {
                sub_path.path.clone()
            }
        }
    }

    fn has_own_mount(&self) -> bool {
        matches!(
            self.storage,
            Storage::Memory | Storage::Disk | Storage::Server
        )
    }

    fn is_dead(&self, device: u32) -> bool {
        self.dead.contains(&device)
    }
}

fn opposite(kind: FileKind) -> FileKind {
    match kind {
        FileKind::File => FileKind::Directory,
        FileKind::Directory => FileKind::File,
    }
}
