//! The running containers of Docker and Podman on this node.
//!
//! The state folders of containerd and of the OCI runtimes name them, with the spec that each was
//! started with. They are root's, and they are right while no engine runs: Podman has no daemon,
//! and containers outlive dockerd (docs/decisions/0028).
//!
//! | engine | folder | spec | init process |
//! |---|---|---|---|
//! | Docker | containerd's tasks in the namespace `moby` | in the folder | its `init.pid` |
//! | Podman | state of crun or runc | `bundle` in the state | in the state |

mod writers;

use std::path::{Path, PathBuf};

use bindguard_core::identity::MANAGER;
use bindguard_core::spec::SpecView;
use bindguard_guard::bundle_and_pid;
use bindguard_sys::bundle::read_spec;

use crate::bundles::{STATES, entries, init_of_task};

pub use writers::ContainersOfNode;

/// containerd's task folders of dockerd: with the node's containerd, with a containerd of its own,
/// as a snap.
const MOBY: [&str; 3] = [
    "run/containerd/io.containerd.runtime.v2.task/moby",
    "run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby",
    "run/snap.docker/containerd/daemon/io.containerd.runtime.v2.task/moby",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    Docker,
    /// Podman, as root.
    Podman,
}

/// A container of an engine, which may end at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineContainer {
    pub id: String,
    pub engine: Engine,
    /// The bundle with its spec.
    pub bundle: PathBuf,
    pub pid: u32,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Self::Docker => "Docker",
            Self::Podman => "Podman",
        }
    }
}

/// The folders in which running containers have a folder, on a node whose `/` is at `root`. Not all
/// of them exist.
pub fn state_folders(root: &Path) -> Vec<(Engine, PathBuf)> {
    let docker = MOBY.map(|folder| (Engine::Docker, root.join(folder)));
    let podman = STATES.map(|folder| (Engine::Podman, root.join(folder)));
    docker.into_iter().chain(podman).collect()
}

/// The running containers whose state is in these folders.
pub fn engine_containers(folders: &[(Engine, PathBuf)]) -> Vec<EngineContainer> {
    let mut found = Vec::new();
    for (engine, folder) in folders {
        for state in entries(folder) {
            found.extend(container(*engine, &state));
        }
    }
    found
}

/// The container with this state folder. `None` if it is not started yet, ended meanwhile, or is no
/// container of the engine.
pub fn container(engine: Engine, state: &Path) -> Option<EngineContainer> {
    let id = state.file_name()?.to_str()?.to_owned();
    let (bundle, pid) = match engine {
        Engine::Docker => (state.to_owned(), init_of_task(state)?),
        Engine::Podman => {
            let (bundle, pid) = bundle_and_pid(state)?;
            // CRI-O has its state in the same folders; its containers belong to pods.
            let spec = read_spec(&bundle).ok()?;
            let manager = SpecView::from_bytes(&spec).ok()?;
            if manager.annotation(MANAGER) != Some("libpod") {
                return None;
            }
            (bundle, pid)
        }
    };
    Some(EngineContainer {
        id,
        engine,
        bundle,
        pid,
    })
}

/// The user whose rootless container this is. The host paths of such a container belong to a mount
/// namespace of the user.
pub fn rootless_owner(root: &Path, id: &str) -> Option<String> {
    for user in entries(&root.join("run/user")) {
        for states in STATES {
            let state = user.join(states.trim_start_matches("run/")).join(id);
            if state.metadata().is_ok() {
                return Some(user.file_name()?.to_string_lossy().into_owned());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use bindguard_core::refresh::SpecBind;

    use std::fs;

    use super::*;
    use crate::bundles;

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// The files as dockerd 20.10 with containerd 1.6, Podman 4.3 with crun 1.8 and runc 1.1, and
    /// CRI-O leave them.
    #[test]
    fn containers_are_found_by_the_state_of_their_runtimes() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        write(
            at("run/containerd/io.containerd.runtime.v2.task/moby/d1/init.pid"),
            "11",
        );
        write(
            at("run/containerd/io.containerd.runtime.v2.task/moby/created/config.json"),
            "{}",
        );
        write(
            at("run/containerd/io.containerd.runtime.v2.task/k8s.io/k1/init.pid"),
            "12",
        );
        for (id, manager) in [("p1", "libpod"), ("p2", "libpod"), ("c1", "cri-o")] {
            write(
                at(&format!("b/{id}/config.json")),
                &format!(r#"{{"annotations":{{"{MANAGER}":"{manager}"}}}}"#),
            );
        }
        let bundle = |id: &str| at(&format!("b/{id}")).display().to_string();
        let crun = |id: &str, pid: u32| {
            format!(
                r#"{{"pid":{pid},"process-start-time":1,"bundle":"{}"}}"#,
                bundle(id)
            )
        };
        write(at("run/crun/p1/status"), &crun("p1", 13));
        write(at("run/crun/c1/status"), &crun("c1", 14));
        let runc = format!(
            r#"{{"init_process_pid":15,"config":{{"labels":["a=b","bundle={}"]}}}}"#,
            bundle("p2")
        );
        write(at("run/runc/p2/state.json"), &runc);
        write(at("run/user/1000/crun/r1/status"), "{}");
        let mut found = engine_containers(&state_folders(root.path()));
        found.sort_by_key(|container| container.pid);
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.engine, it.id.as_str(), it.pid))
            .collect();
        assert_eq!(
            found,
            [
                (Engine::Docker, "d1", 11),
                (Engine::Podman, "p1", 13),
                (Engine::Podman, "p2", 15)
            ]
        );
        write(
            at("b/c1/config.json"),
            r#"{"mounts":[{"type":"bind","source":"/s","destination":"/d"}]}"#,
        );
        let bind = SpecBind {
            destination: "/d".into(),
            source: "/s".into(),
        };
        assert_eq!(bundles::binds_of_container(root.path(), "c1"), [bind]);
        assert_eq!(bundles::binds_of_container(root.path(), "created"), []);
        assert_eq!(bundles::binds_of_container(root.path(), "gone"), []);
        assert_eq!(rootless_owner(root.path(), "r1").as_deref(), Some("1000"));
        assert_eq!(rootless_owner(root.path(), "p1"), None);
    }
}
