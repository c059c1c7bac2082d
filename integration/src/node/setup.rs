//! A story's requirements for its node, and the steps that make the node.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{cell::RefCell, process, thread};

use anyhow::{Context, Result, ensure};

use super::Node;
use super::containerd::Configuration;
use super::keeper::{Keeper, KeeperHandle};
use super::namespace::{HostRoot, Namespace};
use crate::image;
use crate::journal::{JOURNAL, ROTATED};
use crate::kubelet::{Kubelet, KubeletRoot};
use crate::mount_calls::{own_copy, tmpfs};
use crate::privilege;
use crate::process::{run, write_program};
use crate::programs::{
    AGENT, CLI, GUARD, Generation, Matrix, Oci, SHIM, binaries_under_test, folder_with_fault_points,
};
use crate::runtime::ObedientRuntime;
use crate::systemd;

/// The default path of containerd's configuration.
const CONFIG: &str = "/etc/containerd/config.toml";
/// The name of the node of a story in a pid namespace of its own.
const ALONE: &str = "BINDGUARD_STORY_ALONE";
/// The folders that an installation writes to, and that a kubelet's root may be in.
const OWN: [&str; 3] = ["/etc", "/usr/local", "/var/lib"];
/// Their content on this machine is not a bare node's.
const FRESH: [&str; 5] = [
    "/etc/bindguard",
    "/etc/containerd",
    "/etc/containers",
    "/etc/docker",
    "/var/lib/bindguard",
];

#[derive(Clone, Debug)]
pub struct Setup {
    generation: Generation,
    oci: Oci,
    host_root: HostRoot,
    kubelet_root: KubeletRoot,
    cri: bool,
    nri: bool,
    systemd: bool,
    obedient: bool,
    mounts_wrongly: bool,
    under_test: bool,
    bare: bool,
    fault_points: bool,
    policy: String,
    environment: Vec<(String, String)>,
}

impl Setup {
    /// A node with this containerd and the runc of its time.
    pub fn on(generation: Generation) -> Self {
        Self {
            generation,
            oci: Oci::Runc(generation),
            host_root: HostRoot::default(),
            kubelet_root: KubeletRoot::default(),
            cri: false,
            nri: false,
            systemd: false,
            obedient: false,
            mounts_wrongly: false,
            under_test: true,
            bare: false,
            fault_points: false,
            policy: String::new(),
            environment: Vec::new(),
        }
    }

    /// Sets the OCI runtime.
    pub fn oci(self, oci: Oci) -> Self {
        Self { oci, ..self }
    }

    /// Propagation of the host's `/`.
    pub fn host_root(self, host_root: HostRoot) -> Self {
        Self { host_root, ..self }
    }

    /// The kind of the kubelet's root.
    pub fn kubelet_root(self, kubelet_root: KubeletRoot) -> Self {
        Self {
            kubelet_root,
            ..self
        }
    }

    /// With pods.
    pub fn cri(self) -> Self {
        Self { cri: true, ..self }
    }

    /// With pods, and with a socket for NRI plugins: containerd 1.7 or newer.
    pub fn nri(self) -> Self {
        Self {
            cri: true,
            nri: true,
            ..self
        }
    }

    /// With the machine's systemd as cgroup manager, as on most nodes of a cluster: `ctr` names
    /// cgroups in systemd's form, and pods' handlers say `SystemdCgroup = true`.
    pub fn systemd(self) -> Self {
        Self {
            systemd: true,
            ..self
        }
    }

    /// With a runtime that does what the story wants at a verb, see [`ObedientRuntime`] and
    /// [`Gate`](crate::runtime::Gate).
    pub fn obedient_runtime(self) -> Self {
        Self {
            obedient: true,
            ..self
        }
    }

    /// With a runtime that mounts what the spec does not say: the journal may have such binds.
    pub fn faulty_runtime(self) -> Self {
        Self {
            obedient: true,
            mounts_wrongly: true,
            ..self
        }
    }

    /// Without the binaries under test: for stories about the stock shim.
    pub fn stock(self) -> Self {
        Self {
            under_test: false,
            ..self
        }
    }

    /// A node without bindguard: the programs lie in a folder outside of every search path,
    /// containerd's file is where it is by default and knows runc alone, and the node has an
    /// `/etc`, a `/usr/local` and a `/var/lib` to which an installation can be let.
    pub fn bare(self) -> Self {
        Self { bare: true, ..self }
    }

    /// With a guard and a shim that were built with fault points.
    pub fn fault_points(self) -> Self {
        Self {
            fault_points: true,
            ..self
        }
    }

    /// Sets a fault for every run of the guard: `PLACE` kills the guard there, `stop:PLACE` stops
    /// it there, `panic:PLACE` makes it panic there. With `no-beneath` the guard has no
    /// MOVE_MOUNT_BENEATH.
    pub fn fault(self, fault: &str) -> Self {
        self.fault_points().env("BINDGUARD_FAULT", fault)
    }

    /// More lines for bindguard's `config.toml`, after the `[kubelet]` table.
    pub fn policy(self, lines: &str) -> Self {
        Self {
            policy: lines.to_owned(),
            ..self
        }
    }

    /// A variable in containerd's environment, which shims and runtimes inherit.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs a story on this node. Where nodes cannot be made it is skipped aloud; an error prints
    /// the post mortem and fails the test.
    pub fn story(self, story: impl FnOnce(&Node) -> Result<()>) {
        if let Some(why) = self.missing() {
            return privilege::skipped(&why);
        }
        let (generation, mounts_wrongly) = (self.generation, self.mounts_wrongly);
        let node = match self.start() {
            Ok(node) => node,
            Err(error) => {
                let failure = format!("make a node with {generation}: {error:#}");
                say_at_once(&failure);
                panic!("{failure}");
            }
        };
        let told = story(&node).and_then(|()| match mounts_wrongly {
            true => Ok(()),
            false => no_container_is_wrong(),
        });
        if let Err(error) = told {
            // the panic makes `Drop` print the post mortem
            let version = Matrix::locate().and_then(|matrix| matrix.containerd_version(generation));
            let version = version.unwrap_or_else(|error| format!("of unknown version ({error:#})"));
            let failure = format!("on containerd {version}: {error:#}");
            say_at_once(&failure);
            panic!("{failure}");
        }
    }

    /// Runs a story in a separate pid namespace: `/proc` shows only this story's processes, so a
    /// command that checks the whole machine sees nothing of parallel stories. `test` is the name
    /// of the test, which is started again in the pid namespace.
    pub fn story_alone(self, test: &str, story: impl FnOnce(&Node) -> Result<()>) {
        if std::env::var_os(ALONE).is_some() {
            return self.story(story);
        }
        if let Some(why) = self.missing() {
            return privilege::skipped(&why);
        }
        if let Err(error) = in_own_pid_namespace(test) {
            panic!("{test} in a pid namespace of its own: {error:#}");
        }
    }

    /// Makes the node. The calling thread is inside of it until it is dropped.
    pub fn start(self) -> Result<Node> {
        self.start_with_keeper(drop)
    }

    /// Makes the node, and first of all hands out the way to end it: a signal may come while it is
    /// being made.
    pub fn start_with_keeper(self, use_keeper: impl FnOnce(KeeperHandle)) -> Result<Node> {
        let matrix = Matrix::locate()?;
        let name = unique_name();
        // root runs no program below a folder that any user can write, such as /var/tmp
        let disk = Path::new("/var/cache").join(&name);
        let keeper = Keeper::start(&name, &[&disk])?;
        use_keeper(keeper.handle());
        fs::create_dir(&disk).with_context(|| format!("create {}", disk.display()))?;
        let namespace = Namespace::enter(self.host_root, self.systemd)?;
        if self.bare {
            OWN.iter().try_for_each(|folder| {
                own_copy(folder, &Path::new("/run/own").join(&folder[1..]))
            })?;
            FRESH
                .iter()
                .filter(|folder| Path::new(folder).exists())
                .try_for_each(fs::remove_dir_all)?;
        }
        // containerd waits for its disk a dozen times for each container, and parallel tests keep
        // the disk busy. A node's state is temporary, so it is in memory.
        let state = disk.join("containerd");
        fs::create_dir(&state).with_context(|| format!("create {}", state.display()))?;
        tmpfs(&state, "mode=711")?;
        let kubelet = Kubelet::start(&disk, self.kubelet_root)?;
        let node = Node {
            ctr: matrix.program(self.generation, "ctr"),
            daemon: matrix.program(self.generation, "containerd"),
            daemon_config: if self.bare {
                CONFIG.into()
            } else {
                disk.join("containerd.toml")
            },
            under_test: disk.join(if self.bare { "dist" } else { "bin" }),
            environment: self.environment(&disk, &kubelet)?,
            generation: self.generation,
            systemd: self.systemd,
            containerd: RefCell::new(None),
            keeper,
            _namespace: namespace,
            kubelet,
            name,
            disk,
        };
        self.lay_out_programs(&matrix, &node.programs())?;
        if self.under_test {
            self.lay_out_programs_under_test(&node.under_test)?;
        }
        let (disk, programs) = (&node.disk, &node.programs());
        let configuration = Configuration {
            disk,
            programs,
            cri: self.cri,
            nri: self.nri,
            handlers: !self.bare,
            systemd: self.systemd,
        };
        configuration.write(&node.daemon_config)?;
        node.start_containerd()?;
        self.import_images(&node)?;
        Ok(node)
    }

    /// The story's requirements that the machine or the programs lack.
    fn missing(&self) -> Option<String> {
        let lacks_fault_points = self.fault_points && folder_with_fault_points().is_none();
        let without = || format!("no {GUARD}, {AGENT} and {SHIM} with the feature fault-points");
        let without_fault_points = || lacks_fault_points.then(without);
        let without_systemd = || self.systemd.then(systemd::missing).flatten();
        let here = privilege::missing()
            .or_else(|| self.kubelet_root.unavailable())
            .or_else(without_systemd);
        here.or_else(without_fault_points)
    }

    fn environment(&self, disk: &Path, kubelet: &Kubelet) -> Result<Vec<(String, String)>> {
        let policy = disk.join("bindguard.toml");
        let text = format!("[kubelet]\nroots = [{:?}]\n{}", kubelet.root(), self.policy);
        fs::write(&policy, text).with_context(|| format!("write {}", policy.display()))?;
        // what containerd and runc leave when they are killed is not for the machine's /tmp
        let temporary = disk.join("tmp");
        fs::create_dir(&temporary).with_context(|| format!("create {}", temporary.display()))?;
        let own = [
            (
                "PATH".to_owned(),
                format!(
                    "{}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    disk.display()
                ),
            ),
            ("BINDGUARD_CONFIG".to_owned(), policy.display().to_string()),
            ("TMPDIR".to_owned(), temporary.display().to_string()),
        ];
        Ok(own
            .into_iter()
            .chain(self.environment.iter().cloned())
            .collect())
    }

    /// containerd finds shims and runc on its `PATH`, so a folder of links decides which shims and
    /// runtimes a node has.
    fn lay_out_programs(&self, matrix: &Matrix, folder: &Path) -> Result<()> {
        fs::create_dir(folder).with_context(|| format!("create {}", folder.display()))?;
        let oci = matrix.oci(self.oci);
        let shim = "containerd-shim-runc-v2";
        let mut links = vec![(matrix.program(self.generation, shim), shim)];
        if self.bare {
            links.push((matrix.program(self.generation, "containerd"), "containerd"));
            write_systemctl(folder)?;
        }
        if self.obedient {
            ObedientRuntime::of(folder).install(&oci)?;
        } else {
            links.push((oci, "runc"));
        }
        links
            .into_iter()
            .try_for_each(|(program, name)| link(&program, &folder.join(name)))
    }

    fn lay_out_programs_under_test(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let faulty = self.fault_points.then(folder_with_fault_points).flatten();
        let built = binaries_under_test()?;
        let broken = faulty.as_ref().unwrap_or(&built);
        // not a link: the shim expects the guard beside its own executable
        let shim = broken.join(SHIM);
        fs::copy(&shim, folder.join(SHIM)).with_context(|| format!("copy {}", shim.display()))?;
        [
            (broken.join(GUARD), GUARD),
            (built.join(CLI), CLI),
            (broken.join(AGENT), AGENT),
        ]
        .into_iter()
        .try_for_each(|(program, name)| link(&program, &folder.join(name)))
    }

    fn import_images(&self, node: &Node) -> Result<()> {
        let archive = node.disk.join("images.tar");
        image::write(&archive)?;
        node.ctr().import(&archive)?;
        if self.cri {
            node.ctr().in_namespace("k8s.io").import(&archive)?;
            node.cri()?.wait_for_image(image::PAUSE)?;
        }
        Ok(())
    }
}

/// Runs a single test of this program again, with this variable set.
fn in_own_pid_namespace(test: &str) -> Result<()> {
    let mut command = process::Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    // The shell is process 1 and reaps the shims, whose parents end.
    command.args(["sh", "-c", "\"$@\"; exit $?", "sh"]);
    command
        .arg(std::env::current_exe().context("find the test's own program")?)
        .args([test, "--exact", "--nocapture"])
        .env(ALONE, unique_name());
    let ended = run(command)?;
    print!("{}", ended.stdout);
    eprint!("{}", ended.stderr);
    let has_passed = ended.stdout.contains("test result: ok. 1 passed");
    ensure!(has_passed, "exit status {}", ended.status);
    Ok(())
}

/// A proof that finds a difference where the runtime did what the spec says is a false alarm.
fn no_container_is_wrong() -> Result<()> {
    for file in [JOURNAL, ROTATED] {
        let text = fs::read_to_string(file).unwrap_or_default();
        let wrong = text
            .lines()
            .find(|line| line.contains("\"verdict\":\"wrong\""));
        ensure!(
            wrong.is_none(),
            "a false alarm: {}",
            wrong.unwrap_or_default()
        );
    }
    Ok(())
}

fn link(program: &Path, name: &Path) -> Result<()> {
    symlink(program, name)
        .with_context(|| format!("link {} to {}", name.display(), program.display()))
}

/// A node has no systemd: requests are recorded, for the story to carry out or to check.
fn write_systemctl(folder: &Path) -> Result<()> {
    write_program(
        &folder.join("systemctl"),
        &format!(
            "#!/bin/sh\necho \"$*\" >> {}/systemctl.log\n",
            folder.display()
        ),
    )
}

/// Short, because a unix socket's path may have 107 bytes only.
fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    match std::env::var(ALONE) {
        // Each pid namespace has a process with this pid.
        Ok(name) if count == 0 => name,
        Ok(name) => format!("{name}-{count}"),
        Err(_) => format!("bgt-{}-{count}", process::id()),
    }
}

/// Writes why a story failed past libtest, which holds back a test's output until all have
/// ended: a log that breaks off still has the reason.
fn say_at_once(failure: &str) {
    let thread = thread::current();
    let story = thread.name().unwrap_or("a story");
    let start: String = failure
        .lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(500)
        .collect();
    let _ = writeln!(io::stderr(), "FAILED {story} {start}");
}
