//! The init processes of containers. The CRI writes a container's whole spec into the answer that
//! has its pid, and neither ever changes: so both are queried once. Of the spec, only the user
//! namespaces are kept.
//!
//! A refresh checks the cgroup of the process before it uses the pid.

use std::num::NonZeroUsize;

use bindguard_core::identity::Identity;
use bindguard_operator::cri::{Cri, CriError};
use lru::LruCache;

use super::cri::Init;
use super::listing::NamedContainer;
use crate::container::Container;

/// Limit of init processes that are kept, each with a part of its spec. The others are queried at
/// each refresh.
const MAX_INITS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// The init processes that are known, by the ids of the containers.
#[derive(Debug)]
pub struct Inits(LruCache<String, Init>);

impl Default for Inits {
    fn default() -> Self {
        Self(LruCache::new(MAX_INITS))
    }
}

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
                self.0.push(id.clone(), init.clone());
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
        let gone: Vec<String> = self
            .0
            .iter()
            .filter(|(id, _)| !is_there(id))
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            self.0.pop(&id);
        }
    }
}
