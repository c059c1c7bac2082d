//! Finds the server of a group, or claims the group for a new server, without a lock.
//!
//! ```text
//!   s/<hash of the group>  ── symbolic link ──►  s/<name of its own>, the socket of one server
//! ```
//! Every process that can read this folder could hold a flock(2) on it: a container with a
//! read-only `/run` is enough. So no step takes a file lock:
//! * Each server's socket has a unique name. No process removes a socket on which another server
//!   may be listening.
//! * A socket listens before the link leads to it. Of several `start`s without a link, symlink(2)
//!   succeeds for exactly one.
//! * A link that leads to a server is changed or removed only with the [`LinkRight`] to this server's
//!   links, and only if it still leads there. Names are not used again, so a link never leads back
//!   to an earlier server.
//!
//! docs/decisions/0021 lists the alternatives.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bindguard_sys::{make_folders, unless_absent};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use sha2::{Digest, Sha256};

/// The time limit for a claim. A try fails only if a different process changed the link, or is
/// about to.
const CLAIM_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for a removal: a competing process has the right only for some system calls.
const REMOVE_LIMIT: Duration = Duration::from_secs(1);
/// The pause before the next try.
const PAUSE: Duration = Duration::from_millis(1);

/// The server of the group.
pub enum Claim {
    /// A new server, to be started with this socket.
    New(OwnSocket),
    /// The server that listens here.
    Serving(PathBuf),
}

/// A listening socket without a server yet. Drop removes the socket.
pub struct OwnSocket {
    pub listener: UnixListener,
    path: PathBuf,
    is_handed_over: bool,
}

/// Finds the server behind the group's link, or links the group to a new socket. `takes` returns
/// true if a server that accepts a connection also takes the container.
pub fn claim(
    link: &Path,
    mut takes: impl FnMut(UnixStream) -> io::Result<bool>,
) -> io::Result<Claim> {
    make_folders(folder_of(link), 0o700)?;
    let deadline = Instant::now() + CLAIM_LIMIT;
    let mut own = None;
    while Instant::now() < deadline {
        let Some(old) = target_of(link)? else {
            let new = own.take().map_or_else(|| OwnSocket::bind(link), Ok)?;
            match symlink(&new.path, link) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => own = Some(new),
                made => return made.map(|()| Claim::New(new)),
            }
            continue;
        };
        let connected = connect_to(&old);
        if old == link && fs::read_link(link).is_ok() {
            // A later `start` has replaced the link, whose target is no address for containerd.
            continue;
        }
        let is_dead = match connected {
            // A server that does not accept now is used without the question.
            Ok(server) => {
                if server.map_or(Ok(true), &mut takes)? {
                    return Ok(Claim::Serving(old));
                }
                // The server removes its own socket.
                false
            }
            Err(Errno::CONNREFUSED | Errno::NOENT) => true,
            Err(errno) => return Err(errno.into()),
        };
        let new = own.take().map_or_else(|| OwnSocket::bind(link), Ok)?;
        if !replace(link, &old, &new.path)? {
            own = Some(new);
            continue;
        }
        if is_dead && old != link {
            log::debug!(path:% = old.display(); "removing a stale socket");
            let _ = fs::remove_file(old);
        }
        return Ok(Claim::New(new));
    }
    Err(io::Error::new(
        ErrorKind::TimedOut,
        "the group's server changes all the time",
    ))
}

/// Changes the link from the old socket to the new socket, on which this process listens. Returns
/// false if a different process changes or has changed the link.
fn replace(link: &Path, old: &Path, new: &Path) -> io::Result<bool> {
    let Some(_right) = LinkRight::take(old, new)? else {
        thread::sleep(PAUSE);
        return Ok(false);
    };
    if target_of(link)?.as_deref() != Some(old) {
        return Ok(false);
    }
    let beside = unique_beside(link);
    symlink(new, &beside)?;
    fs::rename(&beside, link).inspect_err(|_| drop(fs::remove_file(&beside)))?;
    Ok(true)
}

/// Removes a socket and the links to the socket. `owner` is a socket on which this process listens.
pub fn remove(owner: &Path, socket: &Path) {
    let deadline = Instant::now() + REMOVE_LIMIT;
    let right = loop {
        match LinkRight::take(socket, owner) {
            Ok(Some(right)) => break right,
            Ok(None) if Instant::now() < deadline => thread::sleep(PAUSE),
            // A link that stays leads nowhere, and the next `start` replaces it.
            Ok(None) | Err(_) => return,
        }
    };
    for entry in fs::read_dir(folder_of(socket))
        .into_iter()
        .flatten()
        .flatten()
    {
        let is_of_group = !entry.file_name().as_encoded_bytes().starts_with(b".");
        if is_of_group && leads_to(&entry.path(), socket) {
            let _ = fs::remove_file(entry.path());
        }
    }
    // A socket at the group's own name may have been replaced by a link to a living server.
    if matches!(target_of(socket), Ok(Some(target)) if target == socket) {
        let _ = fs::remove_file(socket);
    }
    drop(right);
}

/// Connects to the socket that a bundle names, and removes the socket if no process listens on it
/// (ECONNREFUSED). A server that accepts may have been killed a moment ago. `None` for a server that
/// does not even accept, and has its queue full.
pub fn remove_stale(socket: &Path) -> Result<Option<UnixStream>, Errno> {
    // Go's shim and older versions of this shim name the group's path, which may be a link by now.
    // The link may soon lead to a new server.
    let socket = fs::read_link(socket).unwrap_or_else(|_| socket.to_owned());
    let connected = connect_to(&socket);
    if matches!(connected, Err(Errno::CONNREFUSED)) {
        match OwnSocket::bind(&socket) {
            Ok(own) => remove(&own.path, &socket),
            Err(error) => log::warn!(error:%, path:% = socket.display(); "a stale socket stays"),
        }
    }
    connected
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

/// The socket to which a link leads. Go's shim listens at the path of the link itself. None if
/// there is neither.
fn target_of(link: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_link(link) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(Some(link.to_owned())),
        read => unless_absent(read),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// A name that was never used in the folder, as long as the group's name.
fn unique_beside(link: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let words = format!(
        "{} {} {} {number}",
        link.display(),
        std::process::id(),
        since.as_nanos()
    );
    link.with_file_name(hash(words.as_bytes()))
}

/// The SHA-256 in hexadecimal digits.
pub fn hash(bytes: &[u8]) -> String {
    let mut name = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

impl OwnSocket {
    fn bind(link: &Path) -> io::Result<Self> {
        let path = unique_beside(link);
        let own = Self {
            listener: UnixListener::bind(&path)?,
            path,
            is_handed_over: false,
        };
        fs::set_permissions(&own.path, Permissions::from_mode(0o600))?;
        Ok(own)
    }

    /// Returns the path. A server has the socket now, and removes it when it ends.
    pub fn hand_over(mut self) -> PathBuf {
        self.is_handed_over = true;
        self.path.clone()
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if !self.is_handed_over {
            remove(&self.path, &self.path);
        }
    }
}

/// The right to change the links to a socket, until it is dropped. At most one living process has
/// the right.
///
/// ```text
///   s/.<hash of the socket's path>.0  ── symbolic link ──►  a socket on which the owner of the right listens
/// ```
/// symlink(2) succeeds for exactly one process. When the owner dies, the kernel closes the owner's
/// socket, and the next number can be taken. The owner removes all numbers, the lowest first. A
/// competitor may have seen the dead owners before this removal. Therefore each process checks the
/// dead owners again after making its own link. If a dead owner's link is gone, the right was
/// released in between, and the process gives up.
struct LinkRight {
    /// The entries of dead owners, then the entry of this process.
    entries: Vec<PathBuf>,
}

impl LinkRight {
    /// Takes the right for `owner`, a socket on which this process listens. `None` if a different
    /// process has the right.
    fn take(socket: &Path, owner: &Path) -> io::Result<Option<Self>> {
        let hash = hash(socket.as_os_str().as_encoded_bytes());
        let mut entries: Vec<PathBuf> = Vec::new();
        let mut dead_owners: Vec<PathBuf> = Vec::new();
        loop {
            // Begins with a dot: no link of a group does.
            let entry = socket.with_file_name(format!(".{hash}.{}", entries.len()));
            match symlink(owner, &entry) {
                Ok(()) => {
                    for (dead, owner) in entries.iter().zip(&dead_owners) {
                        if !leads_to(dead, owner) {
                            return fs::remove_file(entry).map(|()| None);
                        }
                    }
                    entries.push(entry);
                    return Ok(Some(Self { entries }));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    match fs::read_link(&entry) {
                        Ok(other) if is_dead(&other) => {
                            entries.push(entry);
                            dead_owners.push(other);
                        }
                        _ => return Ok(None),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for LinkRight {
    fn drop(&mut self) {
        for entry in &self.entries {
            let _ = fs::remove_file(entry);
        }
    }
}

fn leads_to(link: &Path, target: &Path) -> bool {
    fs::read_link(link).is_ok_and(|leads_to| leads_to == target)
}

fn is_dead(owner: &Path) -> bool {
    matches!(connect_to(owner), Err(Errno::CONNREFUSED | Errno::NOENT))
}

#[cfg(test)]
mod tests {
    //! Two `start`s at once, a dead server, and names that an older shim left.

    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::{Barrier, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn claimed(link: &Path) -> Claim {
        claim(link, |_| Ok(true)).unwrap()
    }

    fn new(link: &Path) -> OwnSocket {
        let Claim::New(own) = claimed(link) else {
            panic!("another server listens")
        };
        own
    }

    fn names(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    /// Between fork and exec, a child of a parallel test has this test's sockets open.
    fn until(is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_so() {
            assert!(Instant::now() < deadline, "waited in vain");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Closes the socket and leaves its name and the link, like a server that was killed.
    fn killed(own: OwnSocket) -> PathBuf {
        let path = own.hand_over();
        until(|| connect_to(&path).is_err());
        path
    }

    fn gos_killed(link: &Path) {
        drop(UnixListener::bind(link).unwrap());
        until(|| connect_to(link).is_err());
    }

    fn is_gone(socket: &Path) -> bool {
        matches!(remove_stale(socket), Err(Errno::CONNREFUSED | Errno::NOENT))
    }

    #[test]
    fn a_living_server_is_found_and_a_dead_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, link) = (dir.path().join("s"), dir.path().join("s/group"));
        let own = new(&link);
        assert_eq!(
            fs::metadata(&link).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(
            fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
            0o700
        );
        assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
        let dead = killed(own);
        let next = new(&link);
        assert!(!dead.try_exists().unwrap() && names(&folder) == 2);
        drop(next);
        assert_eq!(names(&folder), 0);
    }

    #[test]
    fn a_server_that_ends_does_not_keep_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let ending = new(&link);
        let Claim::New(next) = claim(&link, |_| Ok(false)).unwrap() else {
            panic!("it ends")
        };
        // The older server removes only its own socket.
        drop(ending);
        assert!(matches!(claimed(&link), Claim::Serving(path) if path == next.path));
    }

    #[test]
    fn one_living_process_has_the_right_to_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, link) = (dir.path().join("socket"), dir.path().join("group"));
        let [own, other] = [&link; 2].map(|link| OwnSocket::bind(link).unwrap());
        let take = |owner: &OwnSocket| LinkRight::take(&socket, &owner.path).unwrap();
        let right = take(&own).unwrap();
        assert!(take(&other).is_none());
        drop(right);
        let right = take(&other).unwrap();
        std::mem::forget(right);
        killed(other);
        drop(take(&own).unwrap());
        drop(own);
        assert_eq!(names(dir.path()), 1, "only the killed owner's socket");
    }

    /// A slow `start` does not change a link that a faster `start` has changed meanwhile.
    #[test]
    fn a_link_to_another_server_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let own = new(&link);
        let slow = OwnSocket::bind(&link).unwrap();
        let before = dir.path().join("the-one-before");
        assert!(!replace(&link, &before, &slow.path).unwrap());
        assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
    }

    /// Two starts at once, beside no server, a dead server, and a dead server of Go's shim at the
    /// link's path: one start makes the link, the second start finds the link.
    #[test]
    fn of_two_starts_one_makes_the_server() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let link = dir.path().join(format!("group{round}"));
            match round % 3 {
                0 => {}
                1 => drop(killed(new(&link))),
                _ => gos_killed(&link),
            }
            let together = Barrier::new(2);
            let start = || {
                together.wait();
                claimed(&link)
            };
            let claims = thread::scope(|scope| {
                let other = scope.spawn(start);
                [start(), other.join().unwrap()]
            });
            match claims {
                [Claim::New(own), Claim::Serving(found)]
                | [Claim::Serving(found), Claim::New(own)] => {
                    assert_eq!(own.path, found);
                }
                [Claim::New(_), Claim::New(_)] => panic!("two servers in round {round}"),
                [Claim::Serving(_), Claim::Serving(_)] => panic!("no server in round {round}"),
            }
        }
    }

    /// Many starts at once, beside the server of the last round: all starts get the same new server.
    /// The old server is dead, or dead while `delete` removes the link, or removes the link at its end.
    #[test]
    fn of_many_starts_one_makes_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let mut last = new(&link);
        for round in 0..600 {
            let (path, together) = (last.path.clone(), Barrier::new(9));
            let ending = match round % 3 {
                2 => Some(last),
                _ => {
                    killed(last);
                    None
                }
            };
            let start = || {
                together.wait();
                let is_old =
                    |server: &UnixStream| server.peer_addr().unwrap().as_pathname() == Some(&path);
                claim(&link, |server| Ok(!is_old(&server))).unwrap()
            };
            let (new, found): (Vec<_>, Vec<_>) = thread::scope(|scope| {
                let starts: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                together.wait();
                match ending {
                    Some(own) => drop(own),
                    None if round % 3 == 1 => drop(remove_stale(&path)),
                    None => {}
                }
                starts
                    .into_iter()
                    .map(|start| start.join().unwrap())
                    .partition(|claim| matches!(claim, Claim::New(_)))
            });
            let [Claim::New(own)] = <[Claim; 1]>::try_from(new)
                .unwrap_or_else(|new| panic!("{} in round {round}", new.len()))
            else {
                panic!("no server in round {round}")
            };
            assert!(
                found
                    .iter()
                    .all(|claim| matches!(claim, Claim::Serving(path) if *path == own.path)),
                "round {round}"
            );
            assert_eq!(names(dir.path()), 2, "round {round}");
            last = own;
        }
    }

    /// Every process that can read the folder can hold flock(2) on it.
    #[test]
    fn a_lock_on_the_folder_delays_no_start() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let reader = fs::File::open(dir.path()).unwrap();
        flock(&reader, FlockOperation::LockExclusive).unwrap();
        let (done, both) = mpsc::channel();
        thread::spawn(move || {
            let socket = killed(new(&link));
            done.send(is_gone(&socket) && !socket.try_exists().unwrap())
        });
        assert_eq!(both.recv_timeout(LIMIT), Ok(true));
    }

    #[test]
    fn only_a_stale_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let own = new(&link);
        assert!(matches!(remove_stale(&own.path), Ok(Some(_))));
        assert_eq!(names(dir.path()), 2);
        let socket = killed(own);
        assert!(is_gone(&socket));
        assert_eq!(names(dir.path()), 0);
        assert!(is_gone(&socket));
    }

    /// `delete` removes the containers of a server that is gone.
    #[test]
    fn a_server_that_does_not_accept_is_not_gone() {
        let dir = tempfile::tempdir().unwrap();
        let own = new(&dir.path().join("group"));
        let mut waiting = Vec::new();
        while let Some(connection) = connect_to(&own.path).unwrap() {
            waiting.push(connection);
        }
        assert!(matches!(remove_stale(&own.path), Ok(None)));
    }

    /// The bundle of an older shim, or Go's, names the group itself.
    #[test]
    fn a_link_at_the_place_of_an_older_socket_is_kept_for_its_living_server() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let own = new(&link);
        remove(&link, &link);
        assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
        assert!(matches!(remove_stale(&link), Ok(Some(_))));
        killed(own);
        assert!(is_gone(&link));
        assert_eq!(names(dir.path()), 0);
    }

    #[test]
    fn the_socket_of_gos_shim_is_found_and_replaced_when_it_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("group");
        let gos = UnixListener::bind(&link).unwrap();
        assert!(matches!(claimed(&link), Claim::Serving(path) if path == link));
        drop(gos);
        until(|| connect_to(&link).is_err());
        drop(new(&link));
        assert_eq!(names(dir.path()), 0);
    }
}
