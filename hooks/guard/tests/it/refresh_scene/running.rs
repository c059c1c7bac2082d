//! The running containers of a node, as a list of inits.

use bindguard_core::mount_table::MountTable;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{HeldProcess, RunningContainers, Writer, WriterReach};

/// A running container, as its runtime has recorded it.
#[derive(Debug, Clone)]
pub struct RunningContainer {
    pub init: u32,
    /// `None` if the spec is not known.
    pub spec: Option<SpecUsers>,
}

#[derive(Debug)]
pub struct RunningInits(pub Vec<RunningContainer>);

impl RunningContainers for RunningInits {
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>> {
        let containers = self.0.clone().into_iter();
        Box::new(containers.map(|container| Writer {
            name: format!("process {}", container.init),
            reach: match table_of(&container) {
                Some(table) => WriterReach::Mounts {
                    table,
                    hidden: Vec::new(),
                },
                None => WriterReach::Unknown,
            },
        }))
    }
}

fn table_of(container: &RunningContainer) -> Option<MountTable> {
    let process = HeldProcess::open(container.init).ok()?;
    let spec = container.spec.as_ref()?;
    let namespace = process.mount_namespace().ok()?;
    let namespace = namespace.accepted(&process, spec.namespace()).ok()?;
    namespace.mounts().ok()
}
