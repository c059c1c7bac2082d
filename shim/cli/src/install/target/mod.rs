//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of its runtime.

mod containerd;
mod crio;
mod docker;
mod podman;
mod runtime_drop_in;

use anyhow::{Result, anyhow};

use super::plan::{Options, Plan};
use super::record::Owner;

pub use self::containerd::CONFIG as CONTAINERD_CONFIG;

/// Plans the changes for a runtime.
pub fn plan(owner: Owner, options: &Options) -> Result<Plan> {
    match owner {
        Owner::Containerd => containerd::plan(options),
        Owner::Docker => docker::plan(options),
        Owner::Podman => podman::plan(options),
        Owner::Crio => crio::plan(options),
        Owner::Bindguard => Ok(Plan::default()),
    }
}

/// The content of an edited file without bindguard. bindguard's own files stay as they were edited.
pub fn cleaned(owner: Owner, bytes: &[u8], original: Option<&[u8]>) -> Result<Vec<u8>> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| anyhow!("it is not text"));
    let cleaned = match owner {
        Owner::Containerd => containerd::cleaned,
        Owner::Docker => docker::cleaned,
        Owner::Podman => podman::cleaned,
        Owner::Crio => crio::cleaned,
        Owner::Bindguard => return Ok(bytes.to_vec()),
    };
    Ok(cleaned(&text(bytes)?, &text(original.unwrap_or_default())?)?.into_bytes())
}

/// The command after which a runtime no longer uses what was in its file `before`.
pub fn restart(owner: Owner, before: &[u8]) -> Option<&'static str> {
    match owner {
        Owner::Containerd => Some(containerd::RESTART),
        Owner::Docker => Some(docker::restart(before)),
        Owner::Crio => Some(crio::RESTART),
        Owner::Podman | Owner::Bindguard => None,
    }
}
