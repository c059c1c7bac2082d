//! The exit status of the verbs that report a node's health, in each situation that an operator
//! meets. The expected numbers are the table of docs/json.md.
//!
//! An unknown is never printed as "unguarded", "0 pods" or "ok".

use std::cell::RefCell;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const DOCUMENT: &str = include_str!("../../../docs/json.md");
const NO_ROOT: [&str; 4] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
];

#[test]
fn the_table_of_the_document() {
    // The node must be healthy, so no process of a parallel story may be visible.
    let test = "health_by_exit_status::the_table_of_the_document";
    Setup::on(Generation::NEWEST)
        .cri()
        .bare()
        .story_alone(test, |node| {
            let table = Table::of_document()?;
            node.without_containerd(Signal::SIGTERM, || {
                fs::rename("/etc/containerd", "/etc/elsewhere")?;
                let ended = table.check(node, "no containerd", &[])?;
                let doctor = &ended[1];
                ensure!(!doctor.stdout.contains("has changed since"), "{doctor:?}");
                fs::rename("/etc/elsewhere", "/etc/containerd")?;
                Ok(())
            })?;
            node.bindguard(["install", "--default"])?.success()?;
            installed_and_not_loaded(node)?;
            node.restart_containerd(Signal::SIGTERM)?;
            let cri = node.cri()?;
            table.check(node, "nothing wrong", &[])?;
            no_kubelet(node, &table)?;
            dockerd_is_silent(node)?;

            let pod = node.kubelet().pod("uid-web")?;
            let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
            let subpath = volume.subpath("app", 0, "app.conf");
            let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
            let sandbox = cri.run_pod("", "web", pod.uid())?;
            cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
            drop(cri);
            not_root(node, &table)?;
            containerd_hangs(node, &table)?;
            for signal in [Signal::SIGTERM, Signal::SIGKILL] {
                node.without_containerd(signal, || {
                    is_unknown(&table.check(node, "containerd stopped", &[])?)
                })?;
            }
            volume.update(&[("app.conf", "two")])?;
            table.check(node, "one stale subPath", &[])?;
            table.is_checked()?;
            node.cri()?.remove_pod(&sandbox)?;
            pod.delete()
        });
}

fn installed_and_not_loaded(node: &Node) -> Result<()> {
    let doctor = node.bindguard(["doctor"])?;
    let status = node.bindguard(["status"])?;
    ensure!(
        doctor.code() == 1 && doctor.stdout.contains("no new pod is guarded"),
        "{doctor:?}"
    );
    for ended in [doctor, status] {
        let said = ended.stdout.contains("run: systemctl restart containerd");
        ensure!(ended.code() == 1 && said, "{ended:?}");
    }
    Ok(())
}

/// A daemon other than containerd. The fake one serves no socket.
fn dockerd_is_silent(node: &Node) -> Result<()> {
    let program = node.disk().join("dockerd");
    host(["cp".as_ref(), "/bin/sleep".as_ref(), program.as_os_str()])?;
    let mut dockerd = node.command(&program)?.arg("1000000").spawn()?;
    let comm = format!("/proc/{}/comm", dockerd.id());
    until("dockerd runs", || {
        Ok(fs::read_to_string(&comm)?.trim() == "dockerd")
    })?;
    let ended = (node.bindguard(["status"]), node.bindguard(["doctor"]));
    dockerd.kill()?;
    dockerd.wait()?;
    let (status, doctor) = (ended.0?, ended.1?);
    let said = "read the active configuration of dockerd";
    let lines = [
        format!("unknown    {said}"),
        format!("unknown    installation: {said}"),
    ];
    for (ended, line) in [&status, &doctor].into_iter().zip(lines) {
        ensure!(
            ended.code() == 2 && ended.stdout.contains(&line),
            "{ended:?}"
        );
    }
    Ok(())
}

fn no_kubelet(node: &Node, table: &Table) -> Result<()> {
    let file = node.disk().join("elsewhere.toml");
    fs::write(&file, "kubelet.roots = ['/nowhere']\n")?;
    let named = format!("BINDGUARD_CONFIG={}", file.display());
    table.check(node, "no kubelet", &["env", &named]).map(drop)
}

fn not_root(node: &Node, table: &Table) -> Result<()> {
    // As the real kubelet's folder.
    let pods = node.kubelet().root().join("pods");
    fs::set_permissions(&pods, Permissions::from_mode(0o750))?;
    let ended = table.check(node, "not root", &NO_ROOT)?;
    is_unknown(&ended)?;
    let diagnose = &ended[2].stdout;
    ensure!(
        diagnose.contains("the mounts of running containers"),
        "{diagnose}"
    );
    fs::set_permissions(&pods, Permissions::from_mode(0o755))?;
    Ok(())
}

fn containerd_hangs(node: &Node, table: &Table) -> Result<()> {
    let named = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "containerd")
    };
    let pid = node.all_processes().into_iter().find(named);
    let pid = Pid::from_raw(pid.context("containerd")?.try_into()?);
    kill(pid, Signal::SIGSTOP)?;
    let ended = table.check(node, "containerd hangs", &[]);
    kill(pid, Signal::SIGCONT)?;
    is_unknown(&ended?)
}

/// `status` and `doctor` do not guess.
fn is_unknown(ended: &[Finished]) -> Result<()> {
    let [status, doctor, ..] = ended else {
        bail!("no status and doctor");
    };
    ensure!(
        status.stdout.contains("\nunknown    ")
            && status.stdout.contains("\npods       unknown")
            && !status.stdout.contains("unguarded"),
        "{status:?}"
    );
    ensure!(
        doctor.stdout.contains("unknown    containerd: "),
        "{doctor:?}"
    );
    Ok(())
}

/// The table of the document, and the rows that were checked.
struct Table {
    verbs: Vec<Vec<String>>,
    rows: Vec<(String, Vec<i32>)>,
    checked: RefCell<Vec<String>>,
}

impl Table {
    fn of_document() -> Result<Self> {
        let lines = DOCUMENT
            .lines()
            .skip_while(|line| !line.starts_with("| situation |"));
        let mut lines = lines.take_while(|line| line.starts_with('|'));
        let cells = |line: &str| -> Vec<String> {
            let cells = line.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().replace('`', "")).collect()
        };
        let head = cells(lines.next().context("no table of situations")?);
        let verbs = head.iter().skip(1);
        let verbs = verbs.map(|verb| verb.split(' ').map(str::to_owned).collect());
        let mut rows = Vec::new();
        for line in lines.skip(1) {
            let cells = cells(line);
            let codes: Result<Vec<i32>, _> = cells[1..].iter().map(|cell| cell.parse()).collect();
            rows.push((cells[0].clone(), codes?));
        }
        Ok(Self {
            verbs: verbs.collect(),
            rows,
            checked: RefCell::default(),
        })
    }

    /// Runs each verb, `before` before the program.
    fn check(&self, node: &Node, situation: &str, before: &[&str]) -> Result<Vec<Finished>> {
        let row = self.rows.iter().find(|(name, _)| name == situation);
        let (_, codes) = row.with_context(|| format!("the document has no {situation}"))?;
        self.checked.borrow_mut().push(situation.to_owned());
        let program = node.under_test().join("bindguard").display().to_string();
        let (mut ended, mut wrong) = (Vec::new(), Vec::new());
        for (verb, code) in self.verbs.iter().zip(codes) {
            let verb: Vec<&str> = verb.iter().map(String::as_str).collect();
            let words = [before, &[&program], &verb].concat();
            let mut command = node.command(words[0])?;
            command.args(&words[1..]);
            let done = run(command)?;
            let text = [done.stdout.as_str(), &done.stderr].concat();
            if done.code() != *code || text.contains("tonic::") {
                wrong.push(format!("not {code}: {done:?}"));
            }
            ended.push(done);
        }
        ensure!(wrong.is_empty(), "{situation}: {}", wrong.join("\n"));
        Ok(ended)
    }

    fn is_checked(&self) -> Result<()> {
        let checked = self.checked.borrow();
        for (name, _) in &self.rows {
            ensure!(checked.contains(name), "{name} was not checked");
        }
        Ok(())
    }
}
