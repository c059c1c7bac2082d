//! Sockets: where a group's server listens, and where containerd does.

use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use sha2::{Digest, Sha256};

/// The directory all of containerd's shims put their sockets in.
const SOCKET_DIRECTORY: &str = "/run/containerd/s";
/// The file in a bundle that tells containerd 1.x, after its restart, where the server is.
const ADDRESS_FILE: &str = "address";

/// A socket that is ours, or somebody else's already.
pub(super) enum Claim {
    /// Bound now.
    Bound(UnixListener),
    /// A server answers there; None where its queue is so full that it did not even accept.
    Serving(Option<UnixStream>),
}

/// The socket of a group: a hash, since paths of sockets are short. Another containerd, or another namespace, has another.
pub(super) fn socket_of_group(containerd: &str, namespace: &str, group: &str) -> PathBuf {
    let key = Path::new(containerd).join(namespace).join(group);
    let digest = Sha256::digest(key.as_os_str().as_encoded_bytes());
    let name = digest.iter().fold(String::with_capacity(64), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    });
    Path::new(SOCKET_DIRECTORY).join(name)
}

/// Binds the socket, unless a server answers there. What a dead server left is removed.
///
/// Two containers of a pod may do this at the same moment: without the lock one would take for dead what the other has
/// bound but does not listen on yet, and remove it. The lock goes with the descriptor.
pub(super) fn claim(path: &Path) -> io::Result<Claim> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory_of(path))?;
    let _lock = lock_beside(path)?;
    match bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
        bound => return bound.map(Claim::Bound),
    }
    if let Served::By(server) = connect_to(path)? {
        return Ok(Claim::Serving(server));
    }
    tracing::debug!(path = %path.display(), "removing a stale socket");
    // A server that ends removes its own, and may do so right now.
    let _ = fs::remove_file(path);
    bind(path).map(Claim::Bound)
}

fn directory_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Nobody else binds or removes a socket in the same directory.
fn lock_beside(path: &Path) -> io::Result<fs::File> {
    let directory = fs::File::open(directory_of(path))?;
    flock(&directory, FlockOperation::LockExclusive)?;
    Ok(directory)
}

enum Served {
    By(Option<UnixStream>),
    ByNobody,
}

/// Never waits: a server that does not even accept, and has its queue full, is there nevertheless.
fn connect_to(path: &Path) -> io::Result<Served> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Served::By(Some(socket.into()))),
        Err(Errno::AGAIN) => Ok(Served::By(None)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(Served::ByNobody),
        Err(errno) => Err(errno.into()),
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Leaves the address in the bundle, which is the current directory.
pub(super) fn write(address: &str) -> io::Result<()> {
    crate::bundle::write_beside(Path::new(ADDRESS_FILE), address.as_bytes())
}

/// Removes the socket that this bundle names, but not under a server: other containers may be in its group. Answers with a
/// connection to the one that accepts it, which may have been killed a moment ago.
pub(super) fn remove_stale_socket_of_bundle(bundle: &Path) -> Option<UnixStream> {
    let address = fs::read_to_string(bundle.join(ADDRESS_FILE)).ok()?;
    let path = Path::new(address.trim().strip_prefix("unix://").unwrap_or(&address));
    // Without the lock the next server of the group may have bound it since nobody answered.
    let _lock = lock_beside(path).ok()?;
    match connect_to(path).ok()? {
        Served::By(server) => server,
        Served::ByNobody => {
            let _ = fs::remove_file(path);
            None
        }
    }
}

/// Where containerd takes events: what it says in the environment, else by the name it always gives that socket.
pub(crate) fn of_events(containerd: &str) -> String {
    match std::env::var("TTRPC_ADDRESS") {
        Ok(address) if !address.is_empty() => address,
        _ => format!("{containerd}.ttrpc"),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    /// What another test starts has this one's sockets, too, until it has become its program.
    fn until(is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "waited in vain");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn the_name_is_the_one_gos_shim_has() {
        // sha256("/run/containerd/containerd.sock/k8s.io/abc")
        let path = socket_of_group("/run/containerd/containerd.sock", "k8s.io", "abc");
        assert_eq!(
            path,
            Path::new("/run/containerd/s/a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72")
        );
        assert_ne!(path, socket_of_group("/run/containerd/containerd.sock", "moby", "abc"));
    }

    #[test]
    fn a_living_server_is_found_and_a_dead_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s").join("socket");
        let Claim::Bound(server) = claim(&path).unwrap() else { panic!("somebody serves") };
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(dir.path().join("s")).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(claim(&path).unwrap(), Claim::Serving(Some(_))));
        drop(server);
        until(|| matches!(claim(&path).unwrap(), Claim::Bound(_)));
    }

    #[test]
    fn only_a_stale_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let Claim::Bound(server) = claim(&path).unwrap() else { panic!("somebody serves") };
        fs::write(dir.path().join(ADDRESS_FILE), format!("unix://{}", path.display())).unwrap();
        assert!(remove_stale_socket_of_bundle(dir.path()).is_some());
        assert!(path.try_exists().unwrap());
        drop(server);
        until(|| remove_stale_socket_of_bundle(dir.path()).is_none());
        assert!(!path.try_exists().unwrap());
    }
}
