//! A file with versions, a running container that binds it, and a child in that container.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountEntry;
use bindguard_sys::Handle;
use bindguard_sys::enter::{Action, EnterError, Entered, Replacement};
use bindguard_sys::replace::{CloneSettings, clone_like};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::namespace;
use bindguard_testing::{Folder, helper};

pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
pub const PLACE: &str = "/etc/conf";

/// No refresh of a test takes so long.
pub fn far() -> Instant {
    Instant::now() + Duration::from_secs(1000)
}

/// A file with versions, and the root of a container that binds it.
pub struct Scene {
    folder: Folder,
}

impl Scene {
    pub fn new() -> Self {
        let scene = Self {
            folder: Folder::new(),
        };
        fs::create_dir(scene.root()).unwrap();
        fs::write(scene.file(0), "0").unwrap();
        scene
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub fn file(&self, version: u32) -> PathBuf {
        self.folder.path().join(format!("file-{version}"))
    }

    pub fn binds(&self) -> [Inside; 1] {
        [Inside::of(self.file(0), "etc/conf")]
    }

    /// Writes the next version and removes the old version, as a kubelet does.
    pub fn update(&self, version: u32) {
        fs::write(self.file(version), version.to_string()).unwrap();
        fs::remove_file(self.file(version - 1)).unwrap();
    }
}

/// False, with a printed reason, without privilege.
pub fn can_run() -> bool {
    namespace::enter(true)
}

pub fn stale(container: &Container) -> (MountEntry, MountEntry) {
    let table = container.process.mounts().unwrap();
    let stale = table.stack_at(Path::new(PLACE)).last().unwrap().clone();
    let parent = table.mount(stale.parent).unwrap().clone();
    (stale, parent)
}

/// Starts a child in the container, for a replacement.
pub fn enter(container: &Container, replacement: Replacement<'_>) -> Entered {
    let namespace = container.namespace();
    let replacements = vec![replacement];
    Entered::enter(helper(), &namespace, replacements, ANSWER_TIMEOUT, far()).unwrap()
}

/// Enters, with the stale mount at its place open.
pub fn entered(container: &Container, scene: &Scene, version: u32) -> Entered {
    let (stale, parent) = stale(container);
    let target = Handle::of(&scene.file(version)).unwrap();
    let new = clone_like(&target, &stale, None, CloneSettings::default()).unwrap();
    let replacement = Replacement {
        stale: &stale,
        parent: Some(&parent),
        new: Some(new),
    };
    let entered = enter(container, replacement);
    entered.call(Action::Open, 0).unwrap();
    entered
}

/// Attaches a mount beneath the stale mount.
pub type Attach = fn(&Entered) -> Result<(), EnterError>;
pub const METHODS: [Attach; 2] = [
    |entered| entered.call(Action::AttachBeneath, 0),
    |entered| entered.call(Action::Tuck, 0),
];

/// False, with a printed reason, where the kernel has no `MOVE_MOUNT_BENEATH`.
pub fn attached(attach: Attach, entered: &Entered) -> bool {
    match attach(entered) {
        Err(error) if error.is_not_possible() => {
            bindguard_testing::skipped(&format!("{error}: Linux 6.5 and newer"));
            false
        }
        done => {
            done.unwrap();
            true
        }
    }
}

/// The top mount at the place, and its parent.
pub fn stale_top(container: &Container) -> (MountEntry, MountEntry) {
    let table = container.process.mounts().unwrap();
    let stack: Vec<_> = table.stack_at(Path::new(PLACE)).cloned().collect();
    let is_top = |mount: &&MountEntry| !stack.iter().any(|other| other.parent == mount.id);
    let top = stack.iter().find(is_top).unwrap().clone();
    let parent = table.mount(top.parent).unwrap().clone();
    (top, parent)
}
