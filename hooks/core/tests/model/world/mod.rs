//! A volume, its kubelet, its containers and the kernel's mounts, as far as a subpath can notice them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::kubelet::{PathInVolume, Plugin, TimestampDirectory, Writer};
use bindguard_core::mount_table::{Device, FsType, MountRoot};

/// The device of the node's own disk.
const DISK: u32 = 1;

/// The path of a host folder that is a volume.
const ON_THE_HOST: &str = "srv/data";

/// An event in the history of a volume.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// The kubelet writes a payload. It may leave the key out, and its removal of the old one may fail.
    Update { with_key: bool, strands_old: bool },
    /// The kubelet is killed after it wrote a payload and before `..data` names it.
    HalfUpdate,
    /// A container replaces the file with something new, of the same kind or of the other.
    Replace { other_kind: bool },
    /// The file of the current payload is created again, which AtomicWriter never does.
    Remake,
    /// A container removes it.
    Remove,
    /// The kubelet binds the subpath for a container that is about to start, unless it is bound already.
    Bind,
    /// The kubelet removes the subpath's mounts.
    Unbind,
    /// The volume's own mount goes away.
    Unmount,
    /// It is mounted again: another device; a tmpfs is empty, a disk is unchanged.
    Mount,
    /// The daemon or server behind the volume's present mount dies.
    Die,
    /// The server forgets the handle that the subpath was bound by.
    Forget,
    /// A guard is killed after it attached the current target and before it detached the stale mount.
    GuardKilled,
    /// Something about the subpath becomes unreadable, or readable again.
    Veil(Option<Veiled>),
    /// A container is created.
    Create,
}

/// The storage of a volume's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// The kubelet's own disk.
    Node,
    /// A tmpfs of the volume's own.
    Memory,
    /// A disk of the volume's own.
    Disk,
    /// A daemon's or a server's filesystem, mounted for the volume.
    Server,
    /// A folder of the host: the pod has none of that name, and no claim.
    Host,
}

/// The part of the evidence that cannot be read.
#[derive(Debug, Clone, Copy)]
pub enum Veiled {
    Mount,
    Identity,
    Volume,
    Target,
    File,
}

/// A mount at the subpath.
#[derive(Debug, Clone)]
pub struct Bound {
    device: u32,
    root: PathBuf,
    pub file: FileIdentity,
    pub deleted: bool,
    /// A directory that the kubelet made because there was nothing to bind.
    pub is_placeholder: bool,
    /// Its handle is no longer known to its server.
    is_forgotten: bool,
}

/// The whole model.
#[derive(Debug, Clone)]
pub struct World {
    plugin: Plugin,
    storage: Storage,
    is_mounted: bool,
    device: u32,
    /// The devices whose daemon or server no longer answers.
    dead: BTreeSet<u32>,
    data: Option<TimestampDirectory>,
    /// By path below the volume.
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
        world.happen(Event::Update { with_key: true, strands_old: false });
        world.happen(Event::Replace { other_kind: false });
        world
    }

    pub fn happen(&mut self, event: Event) {
        let is_kubelets = self.is_kubelets();
        match event {
            Event::Update { with_key, strands_old } if is_kubelets && self.is_there() => {
                let old = self.data.clone();
                self.data = Some(self.write_payload(with_key));
                if let Some(old) = old.filter(|_| !strands_old) {
                    self.remove(Path::new(old.name()));
                }
            }
            Event::HalfUpdate if is_kubelets && self.is_there() => drop(self.write_payload(true)),
            Event::Replace { other_kind } if !is_kubelets && self.answers() => {
                self.remove(&self.sub_path.clone());
                let file = self.make(if other_kind { opposite(self.kind) } else { self.kind });
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
            Event::Die if self.storage == Storage::Server && self.is_mounted => drop(self.dead.insert(self.device)),
            Event::Forget if self.storage == Storage::Server => {
                self.stack.last_mut().into_iter().for_each(|top| top.is_forgotten = true);
            }
            Event::Veil(veiled) => self.veiled = veiled,
            Event::Update { .. } | Event::HalfUpdate | Event::Replace { .. } | Event::Remake | Event::Remove => {}
            Event::Bind | Event::Unmount | Event::Mount | Event::Die | Event::Forget => {}
            Event::GuardKilled | Event::Create => {}
        }
    }

    /// The file that the kubelet would bind today for the pod's `subPath`.
    pub fn truth(&self) -> Option<FileIdentity> {
        self.files.get(&self.place_of_truth()?).map(|file| seen_on(*file, self.device)).filter(|_| self.is_there())
    }

    /// The file that a container would see at the subpath.
    pub fn shown(&self) -> Option<FileIdentity> {
        self.stack.last().map(|top| seen_on(top.file, top.device))
    }

    /// The evidence that is available without the pod's `subPath`.
    pub fn evidence(&self) -> SubpathEvidence {
        let unreadable = || "EIO".to_owned();
        let mount = self.stack.last().map_or(Observed::Absent, |top| Observed::Seen(self.mount(top)));
        let volume = self.volume();
        let target = match (&mount, &volume) {
            (Observed::Seen(_), Observed::Seen(_)) if self.is_dead(self.device) => Observed::Unreadable(unreadable()),
            (Observed::Seen(mount), Observed::Seen(volume)) => self.target(mount, volume),
            _ => Observed::Absent,
        };
        let mut evidence = SubpathEvidence { mount, reach: self.reach(), volume, target };
        match (self.veiled, &mut evidence) {
            (Some(Veiled::Mount), evidence) => evidence.mount = Observed::Unreadable(unreadable()),
            (Some(Veiled::Volume), evidence) => evidence.volume = Observed::Unreadable(unreadable()),
            (Some(Veiled::Target), evidence) => evidence.target = Observed::Unreadable(unreadable()),
            (Some(Veiled::Identity), SubpathEvidence { mount: Observed::Seen(mount), .. }) => {
                mount.identity = Observed::Unreadable(unreadable());
            }
            (Some(Veiled::File), SubpathEvidence { target: Observed::Seen(target), .. }) => {
                target.file = Observed::Unreadable(unreadable());
            }
            (Some(Veiled::Identity | Veiled::File) | None, _) => {}
        }
        evidence
    }

    pub fn is_kubelets(&self) -> bool {
        self.plugin.writer() == Writer::Kubelet
    }

    pub fn is_veiled(&self) -> bool {
        self.veiled.is_some()
    }

    /// True if the volume is mounted as its plugin requires.
    pub fn is_there(&self) -> bool {
        self.is_mounted == self.has_own_mount()
    }

    /// True if it is, and its daemon or server answers.
    pub fn answers(&self) -> bool {
        self.is_there() && !self.is_dead(self.device)
    }

    /// True if the topmost mount answers every call with an error.
    pub fn shows_what_is_dead(&self) -> bool {
        self.stack.last().is_some_and(|top| top.is_forgotten || self.is_dead(top.device))
    }

    pub fn is_of_the_host(&self) -> bool {
        self.storage == Storage::Host
    }

    /// open_tree and move_mount: the current target of a sub path, directly below the topmost mount.
    pub fn attach_beneath(&mut self, sub_path: &PathInVolume) {
        let at = self.place_of(&self.in_volume(sub_path)).expect("a target was seen");
        let file = *self.files.get(&at).expect("a target was seen");
        assert_eq!(self.stack.last().map(|top| top.file.kind), Some(file.kind), "the kernel says ENOTDIR");
        let root = self.place().join(at);
        let new = Bound { root, file, is_placeholder: false, ..self.bound_now() };
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
        let at = self.place_of_truth().filter(|at| self.files.contains_key(at)).unwrap_or(self.sub_path.clone());
        let file = self.files[&at];
        let root = self.place().join(at);
        self.stack.push(Bound { root, file, is_placeholder, ..self.bound_now() });
    }

    fn bound_now(&self) -> Bound {
        let file = FileIdentity { device: 0, inode: 0, kind: self.kind };
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
            self.files.insert(Path::new(&name).join(&self.sub_path), file);
        }
        timestamp
    }

    fn remove(&mut self, path: &Path) {
        let gone: Vec<FileIdentity> =
            self.files.iter().filter(|(at, _)| at.starts_with(path)).map(|(_, file)| *file).collect();
        self.files.retain(|at, _| !at.starts_with(path));
        // The kernel of this node does not notice a removal on the server.
        let is_noticed = self.storage != Storage::Server;
        self.stack.iter_mut().filter(|bound| gone.contains(&bound.file)).for_each(|bound| bound.deleted = is_noticed);
    }

    fn make(&mut self, kind: FileKind) -> FileIdentity {
        self.made += 1;
        FileIdentity { device: 0, inode: u64::from(self.made), kind }
    }

    fn place_of_truth(&self) -> Option<PathBuf> {
        self.place_of(&self.sub_path)
    }

    fn place_of(&self, path: &Path) -> Option<PathBuf> {
        match self.plugin.writer() {
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
            Storage::Host => sub_path.path.strip_prefix(ON_THE_HOST).expect("it was bound from there").to_owned(),
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server => sub_path.path.clone(),
        }
    }

    fn has_own_mount(&self) -> bool {
        matches!(self.storage, Storage::Memory | Storage::Disk | Storage::Server)
    }

    fn is_dead(&self, device: u32) -> bool {
        self.dead.contains(&device)
    }

    /// The answer to a probe, if one is due.
    fn reach(&self) -> Reach {
        let refused = |number, words: &str| Reach::Refused { number, words: words.to_owned() };
        match self.stack.last() {
            Some(top) if self.is_dead(top.device) => refused(107, "Transport endpoint is not connected"),
            Some(top) if top.is_forgotten => refused(116, "Stale file handle"),
            Some(_) if self.storage == Storage::Server => Reach::Alive,
            Some(_) | None => Reach::NotNeeded,
        }
    }

    fn fs_type(&self, device: u32) -> FsType {
        let name = match self.storage {
            Storage::Memory if device != DISK => "tmpfs",
            Storage::Server if device != DISK => "fuse.bindfs",
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server | Storage::Host => "ext4",
        };
        FsType(name.into())
    }

    fn mount(&self, top: &Bound) -> SubpathMount {
        SubpathMount {
            root: MountRoot { path: top.root.clone(), deleted: top.deleted },
            device: Device { major: 0, minor: top.device },
            fs_type: self.fs_type(top.device),
            identity: Observed::Seen(seen_on(top.file, top.device)),
            covers_its_equal: self.stack.len() > 1,
        }
    }

    fn volume(&self) -> Observed<Volume> {
        let (directory, place, is_mount_point) = match self.storage {
            // The folder is unknown: for a deleted root, the host's mount of that disk takes its place.
            Storage::Host if self.stack.last().is_some_and(|top| top.deleted) => ("/", "/".into(), true),
            Storage::Host => return Observed::Absent,
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server => {
                ("/var/lib/kubelet/pods/u/volumes/p/v", self.place(), self.is_mounted)
            }
        };
        Observed::Seen(Volume {
            plugin: self.plugin,
            directory: directory.into(),
            device: Device { major: 0, minor: self.device },
            fs_type: self.fs_type(self.device),
            place,
            is_mount_point,
            is_newer: true,
            layout: self.plugin.layout(),
        })
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        let Ok(sub_path) = PathInVolume::from_mount(mount, volume) else { return Observed::Absent };
        let Some(at) = self.place_of(&self.in_volume(&sub_path)) else { return Observed::Absent };
        let file = self.files.get(&at).map_or(Observed::Absent, |file| Observed::Seen(seen_on(*file, self.device)));
        Observed::Seen(Target { timestamp: self.data.clone(), file })
    }
}

/// A file by the device that its filesystem has now.
fn seen_on(file: FileIdentity, device: u32) -> FileIdentity {
    FileIdentity { device: u64::from(device), ..file }
}

fn opposite(kind: FileKind) -> FileKind {
    match kind {
        FileKind::File => FileKind::Directory,
        FileKind::Directory => FileKind::File,
    }
}
