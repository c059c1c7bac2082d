//! The host's mount namespace: that of the process behind the CRI's socket.
//!
//! In a pod the agent has a mount namespace of its own. The agent must neither read nor bind there:
//! a propagated copy of a mount is not the kubelet's mount. So the agent enters the runtime's mount
//! namespace before it starts a thread. The namespace of pid 1 may be wrong: a node may be a
//! container. A process of another user than root is no runtime: its mounts are that user's choice.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io, thread};

use anyhow::{Context, Result, bail};
use bindguard_operator::node::uid_of;
use bindguard_operator::unix_http::refuse_server_of_user;
use rustix::net::sockopt::socket_peercred;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::sync::Notify;

const OWN_NAMESPACE: &str = "/proc/self/ns/mnt";

/// The sockets of CRIs: containerd, k3s and RKE2, k0s, MicroK8s, CRI-O.
const SOCKETS: [&str; 5] = [
    "run/containerd/containerd.sock",
    "run/k3s/containerd/containerd.sock",
    "run/k0s/containerd.sock",
    "var/snap/microk8s/common/run/containerd.sock",
    "run/crio/crio.sock",
];

/// The socket of a runtime that is not there yet.
pub const USUAL_SOCKET: &str = "/run/containerd/containerd.sock";

/// The socket of the CRI: the named socket, or the first existing socket, on a node whose `/` is at
/// `root`.
pub fn cri_socket(named: Option<&Path>, root: &Path) -> Option<PathBuf> {
    if let Some(named) = named {
        return Some(root.join(named.strip_prefix("/").unwrap_or(named)));
    }
    let mut usual = SOCKETS.iter().map(|socket| root.join(socket));
    usual.find(|socket| socket.symlink_metadata().is_ok())
}

/// Moves this single-threaded process to the mount namespace of the runtime. Does nothing if the
/// agent is in the host's namespace already.
///
/// # Errors
/// If the runtime or its namespace cannot be found or entered.
pub fn enter(named: Option<&Path>, root: &Path) -> Result<()> {
    let Some(socket) = cri_socket(named, root) else {
        let root = root.display();
        bail!("find the CRI's socket: none is below {root}; name it with --cri");
    };
    let stream = connect(&socket);
    let stream = stream.with_context(|| format!("connect to {}", socket.display()))?;
    let found = namespace_behind(&stream, "mnt").and_then(|theirs| {
        let is_own = number_of(&theirs)? == number_of(OWN_NAMESPACE)?;
        Ok((is_own, File::open(&theirs)?))
    });
    let (is_own, namespace) = found.with_context(|| {
        let socket = socket.display();
        format!("read the mount namespace of the process behind {socket}; is hostPID set")
    })?;
    if is_own {
        return Ok(());
    }
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("enter the host's mount namespace; CAP_SYS_ADMIN and CAP_SYS_CHROOT are required")
}

/// Detects that the runtime left the mount namespace of this process. A unit of systemd with
/// `PrivateTmp=` gets a new mount namespace at each start, and new containers get the mounts of the
/// new namespace.
#[derive(Debug, Clone, Default)]
pub struct RuntimeNamespace(Arc<Notify>);

impl RuntimeNamespace {
    /// Refuses a connection to a runtime in a different mount namespace.
    ///
    /// # Errors
    /// If the namespaces differ. A namespace that cannot be read is accepted.
    pub fn accept(&self, stream: &impl AsFd) -> io::Result<()> {
        refuse_server_of_user(stream)?;
        let theirs = namespace_behind(stream, "mnt").and_then(|path| number_of(&path));
        if let (Ok(theirs), Ok(own)) = (theirs, number_of(OWN_NAMESPACE))
            && theirs != own
        {
            self.0.notify_one();
            return Err(io::Error::other("the runtime has another mount namespace"));
        }
        Ok(())
    }

    /// Waits until a connection was refused.
    pub async fn changed(&self) {
        self.0.notified().await;
    }
}

/// Connects to a server of root.
///
/// # Errors
/// If none listens, or it belongs to a user.
pub fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    refuse_server_of_user(&stream)?;
    Ok(stream)
}

/// Binds an address of the node: in the network namespace of the runtime, because a pod has its own.
///
/// # Errors
/// If the runtime does not answer, or the address cannot be bound.
pub fn bind_on_node(socket: &Path, address: SocketAddr) -> io::Result<TcpListener> {
    let stream = connect(socket)?;
    let namespace = File::open(namespace_behind(&stream, "net")?)?;
    // The namespace is that of a thread, which ends here.
    let bind = thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        TcpListener::bind(address)
    });
    let bound = bind.join();
    bound.unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
}

/// A namespace of the peer process.
fn namespace_behind(stream: &impl AsFd, kind: &str) -> io::Result<String> {
    let peer = socket_peercred(stream)?;
    // the server may have ended, and a process of a user may have its pid by now
    let pid = u32::try_from(peer.pid.as_raw_pid()).unwrap_or_default();
    if uid_of(pid) != Some(peer.uid.as_raw()) {
        let why = format!("process {pid} is no process of user {}", peer.uid.as_raw());
        return Err(io::Error::other(why));
    }
    Ok(format!("/proc/{pid}/ns/{kind}"))
}

/// The number of a namespace: namespaces(7).
fn number_of(namespace: &str) -> io::Result<u64> {
    Ok(fs::metadata(namespace)?.ino())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use rustix::thread::{Uid, set_thread_res_uid};

    use super::*;

    #[test]
    fn the_mounts_of_a_users_process_are_not_the_nodes() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (own, users) = (folder.path().join("own"), folder.path().join("users"));
        let listens = UnixListener::bind(&own).unwrap();
        enter(Some(&own), Path::new("/")).unwrap();
        drop(listens);
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let socket = users.clone();
        // the user of a thread is the user of its listen(2)
        let listens = thread::spawn(move || {
            let user = Uid::from_raw(65534);
            set_thread_res_uid(user, user, user).unwrap();
            UnixListener::bind(socket).unwrap()
        });
        let listens = listens.join().unwrap();
        let refused = enter(Some(&users), Path::new("/")).unwrap_err();
        assert!(refused.to_string().starts_with("connect to"), "{refused}");
        let source = format!("{:#}", refused);
        assert!(source.contains("user 65534"), "{source}");
        let accepted = RuntimeNamespace::default().accept(&UnixStream::connect(&users).unwrap());
        assert!(accepted.is_err());
        drop(listens);
    }
}
