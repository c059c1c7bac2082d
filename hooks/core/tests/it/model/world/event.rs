//! The events and the kinds of volumes that the model knows.

/// An event in the history of a volume.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// The kubelet writes a payload. The payload may lack the key, and the removal of the old
    /// payload may fail.
    Update {
        with_key: bool,
        strands_old: bool,
    },
    /// The kubelet is killed after it wrote a payload and before `..data` names it.
    HalfUpdate,
    /// A container replaces the file by a new file or directory.
    Replace {
        other_kind: bool,
    },
    /// The file of the current payload is created again, which AtomicWriter never does.
    Remake,
    /// A container removes the file.
    Remove,
    /// The kubelet binds the subpath for a container that is about to start, unless the subpath is
    /// already bound.
    Bind,
    /// The kubelet removes the subpath's mounts.
    Unbind,
    /// The volume's own mount goes away.
    Unmount,
    /// The volume is mounted again, with a new device: a tmpfs is empty, a disk is unchanged.
    Mount,
    /// The daemon or server behind the volume's present mount dies.
    Die,
    /// The server forgets the handle with which the subpath was bound.
    Forget,
    /// A guard is killed after it attached the current target and before it detached the stale
    /// mount.
    GuardKilled,
    /// Part of the evidence about the subpath becomes unreadable, or all of it readable again.
    Veil(Option<Veiled>),
    Create,
}

/// The storage of a volume's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    Node,
    /// A tmpfs of the volume's own.
    Memory,
    /// A disk of the volume's own.
    Disk,
    /// A daemon's or a server's filesystem, mounted for the volume.
    Server,
    /// A folder of the host, without a folder or claim in the pod.
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
