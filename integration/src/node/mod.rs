//! A private node: a mount namespace, a containerd with the shims under test, a kubelet's root, and
//! their end.
//!
//! A node is made by [`Setup`] and lives on the thread that started it. Many nodes can run at once:
//! everything with a name of its own (cgroups, the folder on disk) carries the node's, everything
//! else lies in its private `/run`.

mod containerd;
mod keeper;
mod namespace;
mod post_mortem;
mod setup;

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

pub use self::containerd::SOCKET;
pub(crate) use self::keeper::Keeper;
pub use self::keeper::KeeperHandle;
pub use self::namespace::HostRoot;
pub use self::setup::Setup;

use self::containerd::Containerd;
use self::namespace::Namespace;
use crate::cgroup_hierarchy::tracking_hierarchy;
use crate::cri::Cri;
use crate::ctr::Ctr;
use crate::footprint::parent_of;
use crate::kubelet::Kubelet;
use crate::process::{Finished, run};
use crate::programs::CLI;
use crate::programs::Generation;
use crate::systemd;
use crate::waiting::until;

/// The file on the disk of a node to which the agent writes its log.
pub const AGENT_LOG: &str = "agent.log";

/// A running node.
///
/// The fields' order is the order of the end: the thread leaves the namespace, then the keeper ends
/// what is in it.
#[derive(Debug)]
pub struct Node {
    name: String,
    generation: Generation,
    systemd: bool,
    disk: PathBuf,
    ctr: PathBuf,
    daemon: PathBuf,
    daemon_config: PathBuf,
    under_test: PathBuf,
    environment: Vec<(String, String)>,
    kubelet: Kubelet,
    containerd: RefCell<Option<Containerd>>,
    _namespace: Namespace,
    keeper: Keeper,
}

impl Node {
    /// The node's unique name; also its containerd namespace and the parent of all its cgroups.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// bindguard's drop-in, which containerd 2 reads beside its main file.
    pub fn containerd_drop_in(&self) -> PathBuf {
        let folder = self.containerd_config().with_file_name("conf.d");
        folder.join("zz-bindguard.toml")
    }

    /// The texts of containerd's main file and of the drop-in.
    pub fn containerd_files(&self) -> Result<String> {
        let mut text = fs::read_to_string(self.containerd_config())?;
        text += &fs::read_to_string(self.containerd_drop_in()).unwrap_or_default();
        Ok(text)
    }

    /// The generation of its containerd.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The node's folder on the machine's root disk.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// containerd's program.
    pub fn containerd(&self) -> &Path {
        &self.daemon
    }

    /// containerd's main file.
    pub fn containerd_config(&self) -> &Path {
        &self.daemon_config
    }

    /// The `version` line of the newest format that containerd's main file can have.
    pub fn newest_config_version(&self) -> Result<String> {
        let mut default = self.command(&self.daemon)?;
        default.args(["config", "default"]);
        let text = run(default)?.success()?;
        let version = text.lines().find(|line| line.starts_with("version = "));
        let version = version.context("containerd's default config has no version")?;
        Ok(version.to_owned())
    }

    /// The number of shims that run exactly this program.
    pub fn shims_of(&self, program: &Path) -> Result<usize> {
        let runs =
            |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program);
        Ok(self.shims()?.iter().filter(|pid| runs(pid)).count())
    }

    /// The folder that comes first on containerd's `PATH`.
    pub fn programs(&self) -> PathBuf {
        self.disk.join("bin")
    }

    /// The kubelet of the node.
    pub fn kubelet(&self) -> &Kubelet {
        &self.kubelet
    }

    /// A client of the node's containerd. It may be sent to threads that the story starts.
    pub fn ctr(&self) -> Ctr {
        Ctr::new(
            &self.ctr,
            SOCKET,
            &self.name,
            &self.programs(),
            self.slice(),
        )
    }

    /// A client of the node's CRI. The node must have been set up with it.
    pub fn cri(&self) -> Result<Cri> {
        Cri::connect(SOCKET, self.slice().unwrap_or_else(|| self.name.clone()))
    }

    /// The slice that its containers' scopes lie in, where systemd is the cgroup manager.
    pub fn slice(&self) -> Option<String> {
        self.systemd.then(|| systemd::slice_of(&self.name))
    }

    /// The cgroup path of a spec.
    pub fn cgroups_path(&self, id: &str) -> String {
        match self.slice() {
            Some(slice) => format!("{slice}:{}:{id}", self.name),
            None => format!("/{}/{id}", self.name),
        }
    }

    /// A command that runs as a process of the node: in its cgroup, with containerd's environment.
    pub fn command(&self, program: impl AsRef<Path>) -> Result<Command> {
        // enter the cgroup before the program starts, so that no descendant can miss it
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(self.own_group()?.join("cgroup.procs"));
        // containerd prefers XDG_RUNTIME_DIR to TMPDIR, and the tester's own is not in the node's
        // /run
        command
            .arg(program.as_ref())
            .env_remove("XDG_RUNTIME_DIR")
            .envs(self.environment());
        Ok(command)
    }

    /// containerd's environment, as far as it is not the test's: shims and guards inherit it.
    pub fn environment(&self) -> impl Iterator<Item = (&str, &str)> {
        self.environment
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The folder of the programs under test.
    pub fn under_test(&self) -> &Path {
        &self.under_test
    }

    /// Runs the operator's command line with these words.
    pub fn bindguard<S: AsRef<OsStr>>(
        &self,
        words: impl IntoIterator<Item = S>,
    ) -> Result<Finished> {
        let mut command = self.command(self.under_test.join(CLI))?;
        command.args(words);
        run(command)
    }

    /// Ends containerd with `signal` and starts it anew; shims and containers live on, as on a node
    /// that is upgraded.
    pub fn restart_containerd(&self, signal: Signal) -> Result<()> {
        self.without_containerd(signal, || Ok(()))
    }

    /// The same, and in between, as long as there is no containerd, something happens.
    pub fn without_containerd(
        &self,
        signal: Signal,
        happens: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(containerd) = self.containerd.borrow_mut().take() {
            containerd.stop(signal)?;
        }
        happens()?;
        self.start_containerd()
    }

    /// As `restart_containerd`, in a new mount namespace, as a unit with `PrivateTmp=` has it.
    pub fn restart_containerd_in_a_new_namespace(&self) -> Result<()> {
        if let Some(containerd) = self.containerd.borrow_mut().take() {
            containerd.stop(Signal::SIGTERM)?;
        }
        let mut command = self.command("unshare")?;
        command.args(["--mount", "--propagation", "slave"]);
        self.start_containerd_by(command.arg(&self.daemon))
    }

    /// The log of containerd and its shims.
    pub fn log(&self) -> Result<String> {
        let file = self.log_file();
        fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))
    }

    /// Waits until the log has such a line: what a shim writes comes to it by way of containerd, a
    /// moment later.
    pub fn wait_for_log(&self, what: &str, is_it: impl Fn(&str) -> bool) -> Result<()> {
        until(&format!("the log says {what}"), || {
            Ok(self.log()?.lines().any(&is_it))
        })
    }

    /// The names of the node's own processes (containerd, shims, guards; not the containers'), as
    /// the kernel cuts them.
    pub fn processes(&self) -> Result<Vec<String>> {
        let members = self.own_group()?.join("cgroup.procs");
        let pids =
            fs::read_to_string(&members).with_context(|| format!("read {}", members.display()))?;
        // a process that ended meanwhile has no name any more
        Ok(pids
            .lines()
            .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok())
            .collect())
    }

    /// The pids of everything that runs on the node, containers included.
    pub fn all_processes(&self) -> Vec<u32> {
        let tree = tracking_hierarchy().map(|hierarchy| hierarchy.join(&self.name));
        tree.into_iter()
            .chain([systemd::cgroup_of(&self.name)])
            .flat_map(|tree| pids_below(&tree))
            .collect()
    }

    /// The pids of all running shims, stock shims and bindguard's. Between fork and exec a child
    /// still has its parent's comm, so children of shims are left out.
    pub fn shims(&self) -> Result<Vec<u32>> {
        let members = self.own_group()?.join("cgroup.procs");
        let pids =
            fs::read_to_string(&members).with_context(|| format!("read {}", members.display()))?;
        let is_shim = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.starts_with("containerd-shim"))
        };
        let all: Vec<u32> = pids
            .lines()
            .filter_map(|pid| pid.parse().ok())
            .filter(is_shim)
            .collect();
        let is_ones_child = |pid: &u32| parent_of(*pid).is_ok_and(|parent| all.contains(&parent));
        Ok(all
            .iter()
            .copied()
            .filter(|pid| !is_ones_child(pid))
            .collect())
    }

    /// Prints what a reader of a failure needs.
    pub fn print_post_mortem(&self) {
        post_mortem::print(
            &format!("{} ({})", self.name, self.generation),
            &self.log_file(),
            &self.disk.join(AGENT_LOG),
        );
    }

    fn start_containerd(&self) -> Result<()> {
        self.start_containerd_by(&mut self.command(&self.daemon)?)
    }

    fn start_containerd_by(&self, command: &mut Command) -> Result<()> {
        command.arg("--config").arg(&self.daemon_config);
        *self.containerd.borrow_mut() = Some(Containerd::start(command, &self.log_file())?);
        Ok(())
    }

    fn log_file(&self) -> PathBuf {
        self.disk.join("containerd.log")
    }

    /// The leaf for the node's own processes: containers lie beside it, because a v2 cgroup with
    /// processes of its own can have no children with controllers.
    fn own_group(&self) -> Result<PathBuf> {
        let hierarchy = tracking_hierarchy()
            .context("find a cgroup hierarchy to track the node's processes in")?;
        let group = hierarchy.join(&self.name).join("node");
        let made = self.keeper.while_it_waits(|| fs::create_dir_all(&group));
        made.with_context(|| format!("create the cgroup {}", group.display()))?;
        Ok(group)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_post_mortem();
        }
    }
}

/// A cgroup that goes away meanwhile has no processes.
fn pids_below(cgroup: &Path) -> Vec<u32> {
    let members = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<u32> = members.lines().filter_map(|pid| pid.parse().ok()).collect();
    let children = fs::read_dir(cgroup)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    pids.extend(
        children
            .filter(|path| path.is_dir())
            .flat_map(|path| pids_below(&path)),
    );
    pids
}
