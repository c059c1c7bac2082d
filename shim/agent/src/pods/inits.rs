//! The init processes of containers. The CRI writes a container's whole spec into the answer that
//! has its pid, and neither ever changes: so both are queried once. Of the spec, only the user
//! namespaces are kept.
//!
//! A refresh checks the cgroup of the process before it uses the pid.

use std::collections::HashMap;

use bindguard_core::identity::Identity;
use bindguard_operator::cri::{Cri, CriError};

use super::cri::Init;
use super::listing::NamedContainer;
use crate::container::Container;

/// The init processes that are known, by the ids of the containers.
#[derive(Debug, Default)]
pub struct Inits(HashMap<String, Init>);

impl Inits {
    /// Finds the init process of each named container. A container that ended meanwhile is left
    /// out.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn add(
        &mut self,
        cri: &Cri,
        named: Vec<NamedContainer>,
    ) -> Result<Vec<Container>, CriError> {
        let mut containers = Vec::new();
        for NamedContainer { id, name } in named {
            let known = self.0.get(&id).cloned();
            let init = if known.is_some() {
                known
            } else {
                let info = cri.container_info(&id).await?;
                info.as_ref().and_then(Init::from_info)
            };
            if let Some(init) = init {
                self.0.insert(id.clone(), init.clone());
                containers.push(Container {
                    identity: Identity::without_pod(&name),
                    id,
                    name,
                    pid: init.pid,
                    spec: init.spec,
                });
            }
        }
        Ok(containers)
    }

    /// Forgets the containers that are gone.
    pub fn forget_others(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|id, _| is_there(id));
    }
}
