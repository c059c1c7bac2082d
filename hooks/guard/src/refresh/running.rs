//! A running container: its init, held against reuse of its pid, and the mount namespace that its
//! runtime made. Sandboxes, whose mounts the node's kernel does not show, are refused.

use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::spec::SpecUsers;
use bindguard_sys::OldKernel;
use bindguard_sys::enter::{
    ContainerNamespace, HeldProcess, MountNamespace, MountsLock, NamespaceError, ProcessError,
};

/// Time limit of a step in the container.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two tries to get the lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// The name of gVisor's program and of its processes (`runsc/sandbox/sandbox.go`).
const GVISOR: &[u8] = b"runsc";

/// Why a container could not be refreshed at all.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// Its spec is not known: nothing says which user namespace its mounts belong to.
    #[error("its spec is not known: the container runtime reports none")]
    NoSpec,
    /// Its init process is not in the mount namespace that its runtime made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Its init process could not be read, for example because it ended.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Its init process is in the node's own mount namespace: it is no container of runc or crun.
    #[error(
        "process {0} is in the node's own mount namespace, as with Kata and other sandboxes, which are not supported"
    )]
    MountsOfNode(u32),
    /// Its init process is the kernel of gVisor, which has mounts of its own.
    #[error("process {0} is gVisor's sandbox, which is not supported")]
    Sandbox(u32),
    #[error(transparent)]
    OldKernel(#[from] OldKernel),
    /// Another refresh works on the container, or the container holds the lock of its own
    /// namespace.
    #[error("another refresh has locked its mount namespace for {} ms", .0.as_millis())]
    Locked(Duration),
}

impl RefreshError {
    /// True if a later refresh may succeed without any change. For example, another refresh has the
    /// lock, a reader of the process was late, or the process is about to end.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Locked(_) => true,
            Self::Process(error) | Self::Namespace(NamespaceError::Process(error)) => {
                !matches!(error, ProcessError::Table { .. })
            }
            Self::NoSpec
            | Self::Namespace(_)
            | Self::MountsOfNode(_)
            | Self::Sandbox(_)
            | Self::OldKernel(_) => false,
        }
    }
}

/// A running container: its init, and the mount namespace that its runtime made. All checks and
/// entries use the same descriptor of the namespace.
#[derive(Debug)]
pub(super) struct Container<'a> {
    pub(super) process: &'a HeldProcess,
    pub(super) spec: &'a SpecUsers,
    pub(super) namespace: ContainerNamespace,
}

impl<'a> Container<'a> {
    /// The container with this init. `spec` is the runtime's record of the container, `None` if
    /// unknown.
    ///
    /// # Errors
    /// If the process ended, is no process of a container, or left the mount namespace that its
    /// runtime made.
    pub(super) fn open(
        process: &'a HeldProcess,
        spec: Option<&'a SpecUsers>,
    ) -> Result<Self, RefreshError> {
        let namespace = process.mount_namespace()?;
        refuse_sandbox(process, &namespace)?;
        let spec = spec.ok_or(RefreshError::NoSpec)?;
        Ok(Self {
            process,
            spec,
            namespace: namespace.accepted(process, spec.namespace())?,
        })
    }

    /// Waits for the lock for at most [`STEP_TIMEOUT`].
    pub(super) fn lock(&self, until: Instant) -> Result<MountsLock<'_>, RefreshError> {
        let start = Instant::now();
        let timeout = STEP_TIMEOUT.min(until.saturating_duration_since(start));
        loop {
            if let Some(lock) = self.namespace.try_lock()? {
                return Ok(lock);
            }
            if start.elapsed() > timeout {
                return Err(RefreshError::Locked(timeout));
            }
            thread::sleep(LOCK_INTERVAL);
        }
    }
}

/// Refuses a sandbox, whose containers have mounts that the node's kernel does not show. Kata names
/// a process in the node's own namespace, gVisor its own kernel. A container whose program or
/// process is named `runsc` loses only its own refresh.
pub(crate) fn refuse_sandbox(
    process: &HeldProcess,
    namespace: &MountNamespace,
) -> Result<(), RefreshError> {
    if namespace.is_own()? {
        return Err(RefreshError::MountsOfNode(process.pid()));
    }
    // The command line would name gVisor's sandbox, too, but a container can block its readers.
    let program = process.program_name()?;
    if program.starts_with(GVISOR) || process.read("comm")?.starts_with(GVISOR) {
        return Err(RefreshError::Sandbox(process.pid()));
    }
    Ok(())
}
