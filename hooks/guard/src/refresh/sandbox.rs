//! Refuses the processes of sandboxes: their containers have mounts that the node's kernel does not
//! show.

use bindguard_sys::enter::{HeldProcess, MountNamespace};

use super::outcome::RefreshError;

/// The name of gVisor's program and of its processes (`runsc/sandbox/sandbox.go`).
const GVISOR: &[u8] = b"runsc";

/// Kata names a process in the node's own namespace, gVisor its own kernel. A container whose
/// program or process is named `runsc` loses only its own refresh.
///
/// The command line would name gVisor's sandbox, too, but a container can block its readers.
pub(crate) fn refuse_sandbox(
    process: &HeldProcess,
    namespace: &MountNamespace,
) -> Result<(), RefreshError> {
    if namespace.is_own()? {
        return Err(RefreshError::MountsOfNode(process.pid()));
    }
    let program = process.program_name()?;
    match program.starts_with(GVISOR) || process.read("comm")?.starts_with(GVISOR) {
        true => Err(RefreshError::Sandbox(process.pid())),
        false => Ok(()),
    }
}
