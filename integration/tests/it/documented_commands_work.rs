//! Every command that a document shows is run by a story: an operator will copy it at night.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};

use bindguard_integration::doc_commands::{
    NOT_RUN, NotRun, Rehearsal, all_documents, commands_of, commands_outside_of_sh,
    documents_with_commands, repository,
};
use bindguard_integration::engines;
use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::{Pod, privilege};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const KUBECONFIG: &str = "/run/kubeconfig";

/// A document is named, in quotes, by the story that runs it.
#[test]
fn every_document_with_commands_is_run() -> Result<()> {
    let folder = repository().join("integration/tests/it");
    let mut stories = String::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        stories.push_str(
            &fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?,
        );
    }
    let missing: Vec<String> = documents_with_commands()?
        .into_iter()
        .filter(|name| !stories.contains(&format!("{name:?}")))
        .collect();
    ensure!(
        missing.is_empty(),
        "no story runs the commands of {missing:?}"
    );
    Ok(())
}

/// A command that is not in an `sh` block would escape the stories.
#[test]
fn commands_are_in_blocks_that_are_run() -> Result<()> {
    for document in all_documents()? {
        let hidden = commands_outside_of_sh(&document, &PROGRAMS)?;
        ensure!(hidden.is_empty(), "{document} shows {hidden:?} as text");
    }
    Ok(())
}

const PROGRAMS: [&str; 12] = [
    "bindguard",
    "cargo",
    "crictl",
    "ctr",
    "docker",
    "helm",
    "kubectl",
    "make",
    "nsenter",
    "podman",
    "skopeo",
    "systemctl",
];

/// Each command on the list of skipped commands is in a document.
#[test]
fn commands_that_are_not_run_are_in_the_documents() -> Result<()> {
    for NotRun {
        document, command, ..
    } in NOT_RUN
    {
        let is_shown = commands_of(document)?
            .iter()
            .any(|shown| shown.text.starts_with(command));
        ensure!(is_shown, "{document} does not show {command} any more");
    }
    Ok(())
}

/// Commands of bindguard's in the running text: the command line knows their verbs and flags.
#[test]
fn commands_in_the_text_exist() {
    Setup::on(Generation::V1_7).story(|node| {
        let documents = documents_with_commands()?
            .into_iter()
            .chain(UNSHOWN.map(str::to_owned));
        let mut named = 0;
        for document in documents {
            for words in named_in(&document)? {
                let mut words: Vec<&str> = words.split_whitespace().skip(1).collect();
                words.push("--help");
                let ended = node.bindguard(&words)?;
                ensure!(
                    ended.code() == 0,
                    "{document} names `bindguard {}`: {}",
                    words.join(" "),
                    ended.stderr
                );
                named += 1;
            }
        }
        ensure!(named > 10, "only {named} commands were found in the text");
        Ok(())
    });
}

/// Documents without shown commands.
const UNSHOWN: [&str; 11] = [
    "docs/README.md",
    "docs/annotations.md",
    "docs/compare.md",
    "docs/distributions.md",
    "docs/failure-modes.md",
    "docs/journal.md",
    "docs/json.md",
    "docs/local-cluster.md",
    "docs/parity.md",
    "docs/refresh.md",
    "docs/security.md",
];

/// Text between backquotes that begins with bindguard's name, with placeholders as words.
fn named_in(document: &str) -> Result<Vec<String>> {
    let path = repository().join(document);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let prose: String = text.split("```").step_by(2).collect();
    let spans = prose
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|span| span.starts_with("bindguard "));
    Ok(spans
        .map(|span| span.replace(['[', ']'], "").replace('\n', " "))
        .collect())
}

#[test]
fn readme() {
    Setup::on(Generation::V1_7)
        .policy(KEEPS_HOST_ROOTS)
        .bare()
        .cri()
        .story(|node| {
            symlink(
                node.disk().join("dist").join(CLI),
                node.programs().join(CLI),
            )
            .context("put bindguard on PATH")?;
            let scene = Scene::on(node, "")?;
            let rehearsal = scene
                .rehearsal()
                .folder(&repository())
                .instead_of("target/*/release/bindguard ", "bindguard ")
                .prints(
                    "grep '//deleted .*/volume-subpaths/' /proc/1/mountinfo || echo none",
                    &[&scene.stale],
                )
                .prints(
                    "target/*/release/bindguard install --dry-run",
                    &["+++ /etc/containerd/config.toml"],
                )
                .prints(
                    "target/*/release/bindguard install",
                    &["change   /etc/containerd/config.toml"],
                )
                .prints("bindguard diagnose", &["would be re-bound"])
                .prints(
                    "bindguard diagnose pod/web -n default",
                    &["would be re-bound"],
                )
                .prints(
                    "bindguard doctor",
                    &["is stale, and its pod runs under another shim"],
                )
                .prints(
                    "bindguard selftest",
                    &["live-refresh: ", "8 points, 0 not ok"],
                )
                .prints(
                    "bindguard repair pod/web -n default",
                    &["re-bound to the current target"],
                )
                .prints("bindguard holders MOUNT_POINT", &["pod default/web"])
                .prints(
                    "bindguard journal --since 1h",
                    &["re-bound to the current target"],
                )
                .prints(
                    "bindguard uninstall",
                    &[
                        "run      systemctl restart containerd",
                        "remove   /usr/local/bin/bindguard-runtime",
                    ],
                );
            rehearsal.play("README.md")?;
            drop(rehearsal);
            scene.remove()
        });
}

/// The line with which a reader finds out if a node is affected.
#[test]
fn the_line_of_the_readme_finds_a_stale_subpath_and_nothing_else() {
    Setup::on(Generation::V1_7).story(|node| {
        let commands = commands_of("README.md")?;
        let line = commands.first().context("a first command")?;
        let line = line.text.replace("/proc/1/", "/proc/self/");
        let shown = || {
            let mut command = node.command("sh")?;
            command.args(["-ec", &line]);
            run(command)?.success()
        };
        let pod = node.kubelet().pod("0c1d")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        subpath.bind()?;
        let healthy = shown()?;
        ensure!(healthy == "none\n", "on a healthy node: {healthy}");
        volume.update(&[("app.conf", "two")])?;
        let stale = shown()?;
        ensure!(
            stale.lines().count() == 1 && stale.contains(&subpath.target().display().to_string()),
            "on a node with a stale subPath: {stale}"
        );
        let demo = fs::read_to_string(repository().join("integration/demo.sh"))?;
        let (grep, _) = commands[0].text.split_once(" ||").context("a fallback")?;
        ensure!(demo.contains(grep), "the demo shows another line");
        pod.delete()
    });
}

#[test]
fn integration_readme() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        Rehearsal::on(node)
            .folder(&repository())
            .play("integration/README.md")
            .map(drop)
    });
}

#[test]
fn runbook() {
    Setup::on(Generation::NEWEST)
        .policy(KEEPS_HOST_ROOTS)
        .cri()
        .story(|node| {
            let scene = Scene::on(node, "bindguard")?;
            let rehearsal = scene
                .rehearsal()
                .prints(
                    "bindguard diagnose pod/web -n default",
                    &["would be re-bound"],
                )
                .prints(
                    "bindguard diagnose --pod default/web",
                    &[
                        "  refresh  default/web  ",
                        "  refresh  default/web  ",
                        "  refresh  default/web  ",
                        "2 checked, 0 with findings",
                    ],
                )
                .prints(
                    "bindguard repair pod/web -n default --dry-run",
                    &["would be re-bound"],
                )
                .prints(
                    "bindguard repair pod/web -n default",
                    &["re-bound to the current target"],
                )
                .prints(
                    "bindguard repair --pod default/web",
                    &["1 checked, 0"],
                )
                .prints(
                    "bindguard repair --pod default/web --unmount",
                    &["1 checked, 0"],
                )
                .prints(
                    "bindguard holders MOUNT_POINT",
                    &[
                        "pod default/web",
                        "no mount namespace has anything mounted there",
                    ],
                )
                .prints(
                    "bindguard refresh --pod default/web --what host-root",
                    &["replaced   /host of default/web/app"],
                )
                .prints(
                    "bindguard release MOUNT_POINT",
                    &["released   /host/var/"],
                )
                .prints(
                    "bindguard doctor",
                    &[
                        " pinned: ",
                        " fuse-daemons: ",
                        " host-root: ",
                        " mount-helpers: ",
                    ],
                )
                .prints(
                    "grep '/volumes/kubernetes.io~empty-dir/[^/ ]*/' /proc/1/mountinfo || echo none",
                    &["none\n"],
                )
                .prints(
                    "bindguard diagnose --pod default/web --all",
                    &["current  "],
                )
                .prints("bindguard diagnose", &["default/other"])
                .prints(
                    "bindguard journal --since 1h",
                    &["re-bound to the current target"],
                )
                .prints(
                    "bindguard refresh --pod default/web",
                    &["replaced   /etc/app.conf of default/web/app"],
                )
                .prints(
                    "bindguard journal --pod default/web --since 2h",
                    &["refreshed while it runs"],
                )
                .prints("bindguard config check", &["has no mistake"])
                .prints(
                    "bindguard config show",
                    &["checks.stale-subpaths            = \"repair\""],
                )
                .instead_of(
                    "bindguard diagnose --mountinfo /host/proc/1/mountinfo --root /host",
                    "bindguard diagnose --mountinfo /proc/self/mountinfo --root /",
                )
                .prints(
                    "bindguard diagnose --mountinfo /host/proc/1/mountinfo --root /host",
                    &["1 with findings"],
                );
            rehearsal.play("docs/runbook.md")?;
            drop(rehearsal);
            scene.remove()
        });
}

/// The state of all nodes, by kubectl's plugin. kubectl lists the pods; a container of the node's
/// mount namespace with the root at /host runs what `kubectl exec` is to run. The first process
/// there is the machine's, so `diagnose` runs on the node.
#[test]
fn agent() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let api = KubeApi::start()?;
        let path = "/api/v1/namespaces/kube-system/pods";
        let pod = json!({
            "metadata": {"name": "bindguard-x7k2p", "labels": {"app.kubernetes.io/name": "bindguard"}},
            "spec": {"nodeName": "node-1"},
            "status": {"phase": "Running"},
        });
        api.insert(
            path,
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod]}),
        );
        api.write_config(KUBECONFIG.as_ref())?;
        let kubectl = node.programs().join("kubectl");
        fs::write(
            &kubectl,
            format!(
                "#!/bin/sh\n\
                 case \"$*\" in\n\
                 *' -- bindguard --root /host diagnose --json') exec bindguard diagnose --json;;\n\
                 '--namespace kube-system exec bindguard-x7k2p -- '*) shift 5\n\
                   exec unshare --mount sh -ec 'mkdir -p /host; mount --rbind / /host; exec \"$@\"' sh \"$@\";;\n\
                 *) exec {} \"$@\";;\n\
                 esac\n",
                engines::program("kubectl").display()
            ),
        )?;
        fs::set_permissions(&kubectl, Permissions::from_mode(0o755))?;
        fs::copy(
            repository().join("config/kubectl/kubectl-bindguard"),
            node.programs().join("kubectl-bindguard"),
        )
        .context("copy the plugin")?;
        let version = env!("CARGO_PKG_VERSION");
        Rehearsal::on(node)
            .env("KUBECONFIG", KUBECONFIG)
            .prints("kubectl bindguard", &["node-1", version, "containerd=bindguard"])
            .play("docs/agent.md")
            .map(drop)
    });
}

#[test]
fn contributing_and_support() {
    Setup::on(Generation::V1_7).story(|node| {
        for document in ["CONTRIBUTING.md", "docs/support.md"] {
            Rehearsal::on(node).folder(&repository()).play(document)?;
        }
        Ok(())
    });
}

/// kubectl applies the operations and the rights.
#[test]
fn kubediag() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).story(|node| {
        let api = KubeApi::start()?;
        api.write_config(KUBECONFIG.as_ref())?;
        symlink(engines::program("kubectl"), node.programs().join("kubectl"))
            .context("put kubectl on PATH")?;
        Rehearsal::on(node)
            .folder(&repository())
            .env("KUBECONFIG", KUBECONFIG)
            .prints(
                "kubectl apply -f config/kubediag/operations.yaml",
                &["operationset.diagnosis.kubediag.org/bindguard-subpath-remount created"],
            )
            .prints(
                "kubectl apply -f config/kubediag/rbac.yaml",
                &["clusterrole.rbac.authorization.k8s.io/bindguard-agent-kubediag created"],
            )
            .play("docs/kubediag.md")?;
        let applied = api.taken();
        ensure!(
            applied.iter().any(|kind| kind.starts_with("OperationSet "))
                && applied.iter().any(|kind| kind.starts_with("ClusterRole ")),
            "{applied:?}"
        );
        Ok(())
    });
}

/// Its commands on mounts need no containers, only a kernel.
#[test]
fn mounts() {
    Setup::on(Generation::V1_7).story(|node| {
        let said = Rehearsal::on(node)
            .prints("cat bound demo/app.conf", &["one\ntwo\n"])
            .prints(
                "grep //deleted /proc/self/mountinfo",
                &["/demo/..1/app.conf//deleted "],
            )
            .play("docs/mounts.md")?;
        ensure!(
            said.iter().any(|one| one.stdout.contains("does not start")),
            "nothing fails there: {said:?}"
        );
        Ok(())
    });
}

/// Under this policy a container that the guard starts keeps a private bind of the host's root.
const KEEPS_HOST_ROOTS: &str = "[checks]\nhost-root = \"report\"\n";

/// Two pods whose configMap changed, and which keep a disk that the node has unmounted.
struct Scene<'n> {
    node: &'n Node,
    pods: Vec<Pod>,
    sandboxes: Vec<Sandbox>,
    /// The stale mount of the pod default/web.
    stale: String,
}

impl<'n> Scene<'n> {
    fn on(node: &'n Node, handler: &str) -> Result<Self> {
        let disk = &node.disk().join("busy");
        fs::create_dir(disk)?;
        tmpfs(disk, "size=1m")?;
        let cri = node.cri()?;
        let (mut pods, mut sandboxes, mut stale) = (Vec::new(), Vec::new(), Vec::new());
        for (name, uid) in [("web", "0c1d"), ("other", "0c2e")] {
            let pod = node.kubelet().pod(uid)?;
            let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
            let source = volume.subpath("app", 0, "app.conf");
            let mounts = [
                mount(source.bind()?, "/etc/app.conf", PropagationPrivate),
                mount(Path::new("/"), "/host", PropagationPrivate),
            ];
            let sandbox = cri.run_pod(handler, name, pod.uid())?;
            cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
            volume.update(&[("app.conf", "two")])?;
            stale.push(source.target().to_owned());
            pods.push(pod);
            sandboxes.push(sandbox);
        }
        unmount(disk)?;
        let config = node.disk().join("bindguard.toml");
        let text = fs::read_to_string(&config)?.replace(KEEPS_HOST_ROOTS, "");
        fs::write(&config, text).context("repair host-root binds from now on")?;
        Ok(Self {
            node,
            pods,
            sandboxes,
            stale: stale[0].display().to_string(),
        })
    }

    fn rehearsal(&self) -> Rehearsal<'n> {
        let node = self.node;
        Rehearsal::on(node)
            .systemd("restart containerd", || {
                node.restart_containerd(Signal::SIGTERM)
            })
            .reads_all_processes("bindguard doctor")
            .reads_all_processes("bindguard holders")
            .with(
                "/var/lib/kubelet",
                &node.kubelet().root().display().to_string(),
            )
            // the node's mount namespace is not that of the machine's process 1
            .with("/proc/1/mountinfo", "/proc/self/mountinfo")
            .with(
                "MOUNT_POINT",
                &node.disk().join("busy").display().to_string(),
            )
    }

    fn remove(self) -> Result<()> {
        // containerd may have been restarted since
        let cri = self.node.cri()?;
        for sandbox in &self.sandboxes {
            cri.remove_pod(sandbox)?;
        }
        self.pods.into_iter().try_for_each(Pod::delete)
    }
}
