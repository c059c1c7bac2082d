//! The node of all candidates, with containerd 2.1, runc, every shim, and an account of CPU time.
//!
//! All shims run under the same containerd with the same runc, so only the shims differ.

use std::os::unix::fs::symlink;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_integration::ctr::Container;
use bindguard_integration::footprint::parent_of;
use bindguard_integration::programs::Matrix;
use bindguard_integration::{Ctr, Generation, Node, Setup};

use crate::account::CpuAccount;
use crate::candidate::Candidate;

/// Figures of idle shims are taken after this time.
pub const IDLE: Duration = Duration::from_secs(30);

/// A node, its shims and their account, which is closed before the node ends.
#[derive(Debug)]
pub struct Ground {
    pub account: CpuAccount,
    pub shims: Vec<Candidate>,
    pub node: Node,
}

impl Ground {
    /// Makes the node. A shim that the machine does not have is left out, aloud.
    pub fn prepare() -> Result<Self> {
        let matrix = Matrix::locate()?;
        let node = Setup::on(Generation::NEWEST).start()?;
        let mut shims = Vec::new();
        for candidate in Candidate::ALL {
            let Some(program) = candidate.program(&matrix) else {
                eprintln!(
                    "bench: {} is left out: it is not installed (`make bench` does that)",
                    candidate.title()
                );
                continue;
            };
            let link = node.programs().join(candidate.link());
            // a node has the shim under test and runc
            if !link.exists() {
                symlink(&program, &link).with_context(|| format!("link {}", link.display()))?;
            }
            if Candidate::SHIMS.contains(&candidate) {
                shims.push(candidate);
            }
        }
        Ok(Self {
            account: CpuAccount::open(&node)?,
            shims,
            node,
        })
    }

    /// The shims that are here, and the bare runtimes.
    pub fn everybody(&self) -> Vec<Candidate> {
        self.shims
            .iter()
            .copied()
            .chain([Candidate::Runc, Candidate::Crun])
            .collect()
    }

    /// The shims, and the floor of their `start` if it was built.
    pub fn shims_and_floor(&self) -> Vec<Candidate> {
        let floor = Some(Candidate::EmptyPrograms)
            .filter(|floor| self.node.programs().join(floor.link()).exists());
        self.shims.iter().copied().chain(floor).collect()
    }

    /// Starts a pod with this number of containers in one shim. Returns the shim's pid.
    pub fn start_pod(&self, shim: Candidate, name: &str, containers: u64) -> Result<u32> {
        let ctr = self.node.ctr();
        let ids: Vec<String> = (0..containers)
            .map(|n| {
                if n == 0 {
                    name.to_owned()
                } else {
                    format!("{name}-{n}")
                }
            })
            .collect();
        for id in &ids {
            in_pod(&ctr, shim, id, name).start()?.success()?;
        }
        let pids = ctr.pids()?;
        let mut shims = ids
            .iter()
            .map(|id| parent_of(*pids.get(id).with_context(|| format!("find {id}"))?));
        let pid = shims.next().context("a pod has a container")??;
        for other in shims {
            ensure!(
                other? == pid,
                "{} has more than one shim for a pod",
                shim.title()
            );
        }
        Ok(pid)
    }
}

/// A container in a pod's group: containerd's shims take the CRI's annotation for it.
pub fn in_pod<'a>(ctr: &'a Ctr, shim: Candidate, id: &str, pod: &str) -> Container<'a> {
    ctr.container(id)
        .runtime(shim.runtime())
        .annotation("io.kubernetes.cri.sandbox-id", pod)
}
