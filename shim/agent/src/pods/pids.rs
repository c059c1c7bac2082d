//! The init processes of containers. The CRI writes a container's whole spec into the answer that has its pid, and the pid of a
//! container never changes: so it is queried once.
//!
//! A refresh checks the cgroup of the process before it uses the pid.

use std::collections::HashMap;

use super::cri::{Cri, CriError};
use super::listing::NamedContainer;
use crate::refresher::Container;

/// The pids that are known, by the ids of the containers.
#[derive(Debug, Default)]
pub struct Pids(HashMap<String, u32>);

impl Pids {
    /// These containers with their pids. One that ended meanwhile is left out.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn add(&mut self, cri: &Cri, named: Vec<NamedContainer>) -> Result<Vec<Container>, CriError> {
        let mut containers = Vec::new();
        for NamedContainer { id, name } in named {
            let known = self.0.get(&id).copied();
            let pid = if known.is_some() { known } else { cri.pid(&id).await? };
            if let Some(pid) = pid {
                self.0.insert(id.clone(), pid);
                containers.push(Container { id, name, pid, pod: None });
            }
        }
        Ok(containers)
    }

    /// Forgets the containers that are gone.
    pub fn forget_others(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|id, _| is_there(id));
    }
}
