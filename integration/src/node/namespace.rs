//! A mount namespace for a test. The test's thread unshares the namespace, so that all started
//! processes are inside.
//!
//! Inside, `/` is like a real host's: shared, as under systemd, or private, as on some embedded
//! hosts. `/run` is a separate, empty filesystem. Nothing mounted here can reach the machine,
//! because `/` is made private first.
//!
//! unshare(2) and setns(2) act on the calling thread alone. Threads started later share the file
//! system context; setns refuses while such a thread lives, so all threads are joined before the
//! test leaves the namespace.

use std::fs::{File, create_dir};
use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::mount_calls::{bind, tmpfs};

/// Propagation of the node's `/`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostRoot {
    /// As under systemd: mounts propagate to copies of the namespace.
    #[default]
    Shared,
    /// As the kernel leaves it without systemd: nothing spreads, and no option of a container can
    /// change that.
    Private,
}

/// A mount namespace that the thread is in until this value is dropped.
#[derive(Debug)]
pub(super) struct Namespace {
    home: File,
    bound_to_its_thread: PhantomData<*const ()>,
}

impl Namespace {
    /// Unshares the calling thread's mount namespace and arranges it as a node's.
    ///
    /// With `systemd` the machine's own systemd can be reached from inside.
    pub(super) fn enter(host_root: HostRoot, systemd: bool) -> Result<Self> {
        let home =
            File::open("/proc/thread-self/ns/mnt").context("open the host's mount namespace")?;
        unshare(CloneFlags::CLONE_NEWNS).context("unshare the mount namespace")?;
        // from here on, a failure drops `namespace`, which returns the thread
        let namespace = Self {
            home,
            bound_to_its_thread: PhantomData,
        };
        propagation("/", MsFlags::MS_PRIVATE | MsFlags::MS_REC)?;
        hide_the_unified_hierarchy()?;
        let sockets = if systemd {
            systemd_sockets()?
        } else {
            Vec::new()
        };
        tmpfs("/run", "mode=755")?;
        sockets
            .iter()
            .try_for_each(|(path, socket)| put_back(path, socket))?;
        if host_root == HostRoot::Shared {
            propagation("/", MsFlags::MS_SHARED | MsFlags::MS_REC)?;
        }
        Ok(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(errno) = setns(&self.home, CloneFlags::CLONE_NEWNS) {
            eprintln!(
                "leave the node's mount namespace: {errno} (does a thread of the story still run?)"
            );
        }
    }
}

/// The folders of its own socket and of the message bus's, which `/run` is about to hide.
fn systemd_sockets() -> Result<Vec<(&'static str, File)>> {
    let open = |path| {
        Ok((
            path,
            File::open(path).with_context(|| format!("open {path}"))?,
        ))
    };
    ["/run/systemd", "/run/dbus"]
        .into_iter()
        .map(open)
        .collect()
}

fn put_back(path: &str, socket: &File) -> Result<()> {
    create_dir(path).with_context(|| format!("create {path}"))?;
    bind(format!("/proc/self/fd/{}", socket.as_raw_fd()), path)
}

fn propagation(target: &str, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("make {target} {flags:?}"))
}

/// crun refuses a hybrid layout, which is v1 hierarchies beside a unified hierarchy, when the
/// unified hierarchy has controllers.
fn hide_the_unified_hierarchy() -> Result<()> {
    match umount2("/sys/fs/cgroup/unified", MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::ENOENT | Errno::EINVAL) => Ok(()),
        Err(errno) => Err(errno).context("umount /sys/fs/cgroup/unified"),
    }
}
