//! `kubectl bindguard` shows all nodes as one table, through the `kubectl` of the operator. Here
//! `kubectl` is a script: an exec runs the real program on the story's node. The plugin meets a real
//! kubectl and API server in `chart_on_a_cluster`.

use std::os::unix::fs::PermissionsExt;

use bindguard_integration::doc_commands::repository;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// An exec in the agent's pod lands in the mount namespace of the node, with the capabilities of
/// config/agent.yaml.
const KUBECTL: &str = r#"#!/bin/sh
here=$(dirname "$0")
printf '%s\n' "$*" >> "$here/log"
case "$*" in
  *"get pods"*) exec cat "$here/pods" ;;
  *"get nodes"*) [ -e "$here/nodes" ] && exec cat "$here/nodes"; echo forbidden >&2; exit 1 ;;
  *"exec gone "*) echo 'error: unable to upgrade connection: "gone" not found' >&2; exit 1 ;;
  *"exec half "*diagnose*) echo 'bindguard: no "hostPID"' >&2; exit 2 ;;
  *"exec old "*) echo 'command terminated with exit code 2' >&2; exit 2 ;;
esac
while [ "$1" != exec ]; do shift; done
pod=$2; shift 3
case "$pod $*" in
  "installer bindguard --root /host "*" --json" | "half bindguard --root /host "*" --json")
    exec "$here/../dist/bindguard" "$4" --json ;;
  "agent /run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/0123ab/rootfs/usr/local/bin/bindguard "*" --json")
    cap=-all,+sys_admin,+sys_chroot,+sys_ptrace,+dac_override,+fowner,+kill
    exec setpriv --bounding-set "$cap" --inh-caps=-all "$here/../dist/bindguard" "$2" --json ;;
  *) echo "exec: \"$1\": no such file or directory" >&2; exit 126 ;;
esac
"#;

#[test]
fn story() {
    if !privilege::has_program("setpriv") {
        return privilege::skipped("no setpriv");
    }
    Setup::on(Generation::NEWEST)
        .cri()
        .bare()
        .story_alone("kubectl_plugin::story", of_a_fleet);
}

fn of_a_fleet(node: &Node) -> Result<()> {
    node.bindguard(["install", "--default"])?.success()?;
    node.restart_containerd(Signal::SIGTERM)?;
    let fleet = Fleet::on(node)?;

    // one node that lacks nothing
    fleet.has_pods(&["worker-1|bindguard|installer|Running|"])?;
    let well = fleet.plugin(&["--context", "east", "-n", "guard"])?;
    ensure!(well.code() == 0, "{well:?}");
    ensure!(
        row(&well, "worker-1")[..4]
            == [
                "worker-1",
                "ok",
                env!("CARGO_PKG_VERSION"),
                "containerd=bindguard(default)"
            ],
        "{well:?}"
    );
    ensure!(!well.stdout.contains("FINDING  "), "{well:?}");
    let log = fs::read_to_string(fleet.folder.join("log"))?;
    ensure!(
        log.lines()
            .all(|line| line.starts_with("--context east ") && !line.contains(" kube-system"))
            && log.contains("--namespace guard exec installer -- bindguard --root /host diagnose"),
        "{log}"
    );

    // a fleet: a stale subPath, a node whose installer does not start, and nodes that do not answer
    let pod = node.kubelet().pod("9a957d3f-ed3f-4a32-9a31-b4ee9d0e2a3c")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let place = subpath.bind()?;
    let mounts = [mount(place, "/etc/app.conf", PropagationPrivate)];
    let cri = node.cri()?;
    let sandbox = cri.run_pod("", "web", pod.uid())?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    fleet.has_pods(&[
        "worker-2|bindguard-agent|agent|Running||containerd://0123ab",
        "worker-2|bindguard|waits|Pending|ImagePullBackOff",
        "worker-1|bindguard-agent|agent|Running||containerd://0123ab",
        "worker-1|bindguard|installer|Running|",
        "worker-3|bindguard|gone|Running|",
        "worker-4|bindguard|waits|Pending|ImagePullBackOff",
        "worker-5|bindguard|old|Running|",
        "worker-7|bindguard|half|Running|",
        "|bindguard|unscheduled|Pending|",
    ])?;
    let all = "worker-1\nworker-2\nworker-3\nworker-4\nworker-5\nworker-6\nworker-7\n";
    fs::write(fleet.folder.join("nodes"), all)?;
    let table = fleet.plugin(&[])?;
    ensure!(table.code() == 2, "{table:?}");
    let states = |name: &str| row(&table, name)[1].clone();
    ensure!(
        states("worker-1") == "attention"
            && row(&table, "worker-2")[1..] == row(&table, "worker-1")[1..],
        "{table:?}"
    );
    for (name, why) in [
        (
            "worker-3",
            "pod gone: error: unable to upgrade connection: \"gone\" not found",
        ),
        ("worker-4", "pod waits: ImagePullBackOff"),
        ("worker-5", "pod old: kubectl exec ended with 2"),
    ] {
        ensure!(
            states(name) == "unknown" && row(&table, name).join(" ").ends_with(why),
            "{name}: {table:?}"
        );
    }
    let half = row(&table, "worker-7");
    ensure!(
        half[1] == "incomplete"
            && half[7] == "-"
            && half[8..].join(" ") == "findings: pod half: bindguard: no \"hostPID\"",
        "{table:?}"
    );
    let remark = "1 of 7 Linux nodes have no pod of bindguard";
    ensure!(table.stdout.contains(remark), "{table:?}");
    let (_, findings) = table.stdout.split_once("\n\n").context("two tables")?;
    let findings: Vec<Vec<&str>> = findings
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let place = place.display().to_string();
    for line in [
        ["worker-1", "default/web", "app", "stale", &place],
        ["worker-2", "default/web", "app", "stale", &place],
    ] {
        ensure!(findings.iter().any(|it| it[..] == line), "{table:?}");
    }

    // the reports of both commands, byte for byte
    let json = fleet.plugin(&["-o", "json"])?;
    ensure!(json.code() == 2, "{json:?}");
    let nodes: Value = serde_json::from_str(&json.stdout).context("read the plugin's JSON")?;
    ensure!(
        nodes[0]["status"]["daemons"][0]["runtimes"][0] == "bindguard"
            && nodes[0]["diagnose"]["binds"][0]["verdict"] == "stale"
            && nodes[2]["why"].to_string().contains("\\\"gone\\\"")
            && nodes[5]["diagnose"].is_null()
            && nodes[5]["why"].to_string().contains("hostPID"),
        "{nodes}"
    );

    // an operator who may not list nodes
    fs::remove_file(fleet.folder.join("nodes"))?;
    let table = fleet.plugin(&[])?;
    ensure!(
        table.stderr.is_empty() && !table.stdout.contains(" no pod of "),
        "{table:?}"
    );
    for (pods, words, why) in [
        (
            &[][..],
            &[][..],
            "no pod of bindguard runs in namespace kube-system",
        ),
        (&[], &["--verbose"], "unknown argument --verbose"),
        (&[], &["-n"], "-n needs a value"),
        (&[], &["-o", "yaml"], "unknown output yaml"),
    ] {
        fleet.has_pods(pods)?;
        let failed = fleet.plugin(words)?;
        ensure!(
            failed.code() == 2 && failed.stdout.is_empty() && failed.stderr.contains(why),
            "{words:?}: {failed:?}"
        );
    }
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

/// The words of the line of a node.
fn row(table: &Finished, node: &str) -> Vec<String> {
    let mut lines = table.stdout.lines();
    let line = lines.find(|line| line.split(' ').next() == Some(node));
    let words = line.unwrap_or("none none none none").split_whitespace();
    words.map(str::to_owned).collect()
}

/// A folder with `kubectl`.
struct Fleet<'n> {
    node: &'n Node,
    folder: PathBuf,
}

impl<'n> Fleet<'n> {
    fn on(node: &'n Node) -> Result<Self> {
        let folder = node.disk().join("operator");
        fs::create_dir_all(&folder)?;
        let kubectl = folder.join("kubectl");
        fs::write(&kubectl, KUBECTL).context("write kubectl")?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        Ok(Self { node, folder })
    }

    /// Sets the answer to `get pods`.
    fn has_pods(&self, lines: &[&str]) -> Result<()> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(self.folder.join("pods"), text).context("write the pods")
    }

    fn plugin(&self, words: &[&str]) -> Result<Finished> {
        let mut command = self
            .node
            .command(repository().join("config/kubectl/kubectl-bindguard"))?;
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.folder.display()));
        command.args(words);
        run(command)
    }
}

#[test]
fn shellcheck_finds_nothing() -> Result<()> {
    if !privilege::has_program("shellcheck") {
        privilege::skipped("no shellcheck");
        return Ok(());
    }
    let mut command = Command::new("shellcheck");
    command.arg(repository().join("config/kubectl/kubectl-bindguard"));
    run(command)?.success().map(drop)
}
