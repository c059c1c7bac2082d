//! Finds the server of a group, or claims the group for a new one, without a lock.
//!
//! ```text
//!   s/<hash of the group>  ── symbolic link ──►  s/<name of its own>, the socket of one server
//! ```
//! Every process that can read this folder could hold a flock(2) on it: a container with a read-only `/run` is enough. So each
//! step is one system call that succeeds or fails as a whole:
//! * A server's socket has a name that no other server gets. Nothing removes a socket on which another server may listen.
//! * A socket listens before the link leads to it. Of several `start`s, symlink(2) succeeds for one.
//! * rename(2) removes a link to a server that is dead or about to end. A `start` that removed a newer link restores it.
//!
//! Three `start`s beside a dead server can still miss each other, and a pod then has two shims. Both work, because containerd
//! knows each one by the address of its socket. docs/decisions/0021 lists the alternatives.

use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, Permissions},
    io::{self, ErrorKind},
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use sha2::{Digest, Sha256};

/// Each failed try means that another `start` succeeded, or that a server ended.
const TRIES: u32 = 50;

/// The server of the group.
pub(super) enum Claim {
    /// A new server, to be started with this socket.
    New(OwnSocket),
    /// The server that listens here.
    Serving(PathBuf),
}

/// A listening socket without a server yet. It is removed when it is dropped.
pub(super) struct OwnSocket {
    listener: UnixListener,
    path: PathBuf,
    is_handed_over: bool,
}

/// Finds the server behind the group's link, or links the group to a new socket. `takes` returns true if a server that accepts
/// a connection also takes the container.
pub(super) fn claim(link: &Path, mut takes: impl FnMut(UnixStream) -> io::Result<bool>) -> io::Result<Claim> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder_of(link))?;
    let mut own = None;
    for _ in 0..TRIES {
        match find(link)? {
            Found::Missing => {
                let socket = own.take().map_or_else(|| OwnSocket::bind(link), Ok)?;
                match symlink(&socket.path, link) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => own = Some(socket),
                    made => return made.map(|()| Claim::New(socket)),
                }
            }
            Found::Server(socket, None) => return Ok(Claim::Serving(socket)),
            Found::Server(socket, Some(server)) => match takes(server)? {
                true => return Ok(Claim::Serving(socket)),
                // The server removes its own socket.
                false => retire(link, &socket)?,
            },
            Found::Dead(socket) => {
                tracing::debug!(path = %socket.display(), "removing a stale socket");
                retire(link, &socket)?;
                // At the group's own name another `start` may have made its link by now.
                if socket != link {
                    let _ = fs::remove_file(socket);
                }
            }
        }
    }
    Err(io::Error::new(ErrorKind::TimedOut, "the group's server changes all the time"))
}

/// Removes a server's socket, and the links that lead to it.
pub(crate) fn remove(socket: &Path) {
    for entry in fs::read_dir(folder_of(socket)).into_iter().flatten().flatten() {
        let link = entry.path();
        if fs::read_link(&link).is_ok_and(|leads_to| leads_to == socket) {
            // A link that stays leads nowhere, and the next `start` removes it.
            let _ = retire(&link, socket);
        }
    }
    // A socket at the group's own name may have been replaced by a link to a living server.
    let _ = retire(socket, socket);
}

/// The state of the socket that a bundle names.
pub(super) enum SocketState {
    /// No process listens.
    Gone,
    /// A server that accepts; it may have been killed a moment ago.
    Accepts(UnixStream),
    /// A server that does not even accept, and has its queue full; or the kernel does not say.
    Silent,
}

/// Removes the socket if no process listens on it.
pub(super) fn remove_stale(socket: &Path) -> SocketState {
    // Go's shim and older ones of ours name the group, where a link may be by now. It may lead to another server soon.
    let socket = fs::read_link(socket).unwrap_or_else(|_| socket.to_owned());
    match connect_to(&socket) {
        Ok(Some(server)) => SocketState::Accepts(server),
        Err(Errno::CONNREFUSED) => {
            remove(&socket);
            SocketState::Gone
        }
        Err(Errno::NOENT) => SocketState::Gone,
        Ok(None) | Err(_) => SocketState::Silent,
    }
}

enum Found {
    Missing,
    /// Its socket, and a connection; None if its queue is full and it did not accept.
    Server(PathBuf, Option<UnixStream>),
    Dead(PathBuf),
}

fn find(link: &Path) -> io::Result<Found> {
    let socket = match fs::read_link(link) {
        Ok(socket) => socket,
        // Go's shim listens at the path of the link itself.
        Err(error) if error.kind() == ErrorKind::InvalidInput => link.to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Missing),
        Err(error) => return Err(error),
    };
    let connected = connect_to(&socket);
    if socket == link && fs::read_link(link).is_ok() {
        // Another `start` has put its link there since, and that is no address for containerd.
        return find(link);
    }
    match connected {
        Ok(server) => Ok(Found::Server(socket, server)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(Found::Dead(socket)),
        Err(errno) => Err(errno.into()),
    }
}

/// Never waits: a server that does not accept, with a full queue, still counts as present.
fn connect_to(path: &Path) -> Result<Option<UnixStream>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Some(socket.into())),
        Err(Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Removes the link if it still leads to this socket.
fn retire(link: &Path, socket: &Path) -> io::Result<()> {
    let renamed = unique_beside(link);
    match fs::rename(link, &renamed) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        taken => taken?,
    }
    let leads_to = fs::read_link(&renamed).unwrap_or_else(|_| link.to_owned());
    if leads_to != socket {
        // Another `start` was faster. If a third one has made a link meanwhile, that link stays.
        let _ = fs::hard_link(&renamed, link);
    }
    fs::remove_file(renamed)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// A name that no other file in the folder has had, as long as the group's.
fn unique_beside(link: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let words = format!("{} {} {} {number}", link.display(), std::process::id(), since.as_nanos());
    link.with_file_name(hash(words.as_bytes()))
}

/// The SHA-256 in hexadecimal digits.
pub(super) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

impl OwnSocket {
    fn bind(link: &Path) -> io::Result<Self> {
        let path = unique_beside(link);
        let own = Self { listener: UnixListener::bind(&path)?, path, is_handed_over: false };
        fs::set_permissions(&own.path, Permissions::from_mode(0o600))?;
        Ok(own)
    }

    /// The socket for the server.
    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns the path. A server has the socket now, and removes it when it ends.
    pub(super) fn hand_over(mut self) -> PathBuf {
        self.is_handed_over = true;
        self.path.clone()
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if !self.is_handed_over {
            remove(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
