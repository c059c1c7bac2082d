//! Bad input: missing, empty, cut off, foreign, binary, too large, or unreadable. Each message is a
//! single line with the mistake and the remedy, the exit code is 2, and the node is unchanged.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use nix::unistd::chown;

#[test]
fn is_reported_in_one_line() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        let pod = node.kubelet().pod("uid-bad")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        subpath.bind()?;
        volume.update(&[("app.conf", "two")])?;
        let before = subpath.mounts()?;
        let files = BadFiles::below(node.disk())?;
        configs(node, &files)?;
        pods(node)?;
        mount_tables(node, &files)?;
        bundles(node, &files)?;
        journals(node, &files)?;
        without_privilege(node)?;
        command_lines(node)?;
        readers_that_leave(node)?;
        ensure!(subpath.mounts()? == before, "bad input changed the mounts");
        pod.delete()
    });
}

/// A kubelet that bindguard does not know is not reported as healthy.
#[test]
fn a_node_without_a_kubelet() {
    Setup::on(Generation::V1_7).story(|node| {
        fs::write(
            node.disk().join("bindguard.toml"),
            "kubelet.roots = [\"/nowhere/kubelet\"]\n",
        )?;
        refused(
            &node.bindguard(["diagnose"])?,
            "no kubelet has its folders at /nowhere/kubelet: name it in [kubelet] roots",
        )
    });
}

/// Files that anybody may put where bindguard reads, and a folder.
struct BadFiles {
    folder: PathBuf,
}

const NAMES: [&str; 7] = [
    "missing",
    "directory",
    "empty",
    "half",
    "junk",
    "huge",
    "secret",
];

impl BadFiles {
    fn below(disk: &Path) -> Result<Self> {
        let folder = disk.join("bad");
        fs::create_dir_all(folder.join("directory"))?;
        let mountinfo = fs::read("/proc/thread-self/mountinfo")?;
        let junk: Vec<u8> = (0..100_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for (name, bytes) in [
            ("empty", &[][..]),
            ("half", &mountinfo[..mountinfo.len() / 2]),
            ("junk", &junk),
            ("huge", &vec![0; 50 << 20]),
            ("secret", b"{}\n"),
        ] {
            fs::write(folder.join(name), bytes).with_context(|| format!("write {name}"))?;
        }
        let bundle = folder.join("secret");
        fs::set_permissions(&bundle, Permissions::from_mode(0o600))?;
        chown(&bundle, Some(0.into()), Some(0.into()))?;
        Ok(Self { folder })
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

fn configs(node: &Node, files: &BadFiles) -> Result<()> {
    for (name, said) in NAMES.into_iter().zip([
        "No such file",
        "Is a directory",
        "",
        ", line 1: ",
        "it is not text",
        "larger than 1 MiB",
        ", line 1: ",
    ]) {
        let file = files.path(name);
        if name == "empty" {
            // every key is optional
            node.bindguard(["config", "check", &file])?.success()?;
            continue;
        }
        for words in [
            &["config", "check", &file][..],
            &["--config", &file, "diagnose"],
            &["--config", &file, "repair", "--all", "--dry-run"],
        ] {
            refused(&node.bindguard(words)?, said).with_context(|| format!("{words:?}"))?;
        }
    }
    Ok(())
}

/// Both verbs get a pod that does not exist on the node.
fn pods(node: &Node) -> Result<()> {
    for verb in [
        &["diagnose", "--pod", "default/wbe"][..],
        &["repair", "--pod", "default/wbe"],
    ] {
        refused(
            &node.bindguard(verb)?,
            "this node has no subpath and no volume of a pod default/wbe: is it another node's?",
        )
        .with_context(|| format!("{verb:?}"))?;
    }
    Ok(())
}

fn mount_tables(node: &Node, files: &BadFiles) -> Result<()> {
    for name in NAMES.iter().filter(|name| **name != "secret") {
        let said = if matches!(*name, "missing" | "directory") {
            "read "
        } else {
            "take it again, whole"
        };
        let (file, root) = (files.path(name), files.path("directory"));
        let ended = node.bindguard(["diagnose", "--mountinfo", &file, "--root", &root])?;
        refused(&ended, said).with_context(|| (*name).to_owned())?;
    }
    let root = files.path("directory");
    let ended = node.bindguard(["diagnose", "--mountinfo", "/dev/zero", "--root", &root])?;
    refused(&ended, "larger than 256 MiB")
}

fn bundles(node: &Node, files: &BadFiles) -> Result<()> {
    for name in NAMES.iter().filter(|name| **name != "secret") {
        let bundle = files.folder.join("bundles").join(name);
        fs::create_dir_all(&bundle)?;
        let (file, config) = (files.folder.join(name), bundle.join("config.json"));
        match *name {
            "missing" => {}
            "directory" => fs::create_dir(&config)?,
            _ => fs::copy(&file, &config).map(drop)?,
        }
        let ended = node.bindguard(["check".as_ref(), bundle.as_os_str()])?;
        refused(&ended, "BUNDLE is a folder with a container's config.json")
            .with_context(|| (*name).to_owned())?;
        let ended = node.bindguard(["check".as_ref(), bundle.as_os_str(), "--json".as_ref()])?;
        let report: Value = serde_json::from_str(&ended.stdout)?;
        ensure!(
            ended.code() == 2
                && report["problems"]
                    .as_array()
                    .is_some_and(|all| all.len() == 1),
            "{ended:?}"
        );
    }
    Ok(())
}

fn journals(node: &Node, files: &BadFiles) -> Result<()> {
    for (name, said) in [
        ("missing", "no such file"),
        ("directory", "Is a directory"),
        ("half", "is no journal"),
        ("junk", "is no journal"),
        ("huge", "is no journal"),
        ("secret", "is no journal"),
    ] {
        refused(
            &node.bindguard(["journal", "--file", &files.path(name)])?,
            said,
        )
        .with_context(|| name.to_owned())?;
    }
    refused(
        &node.bindguard(["journal", "--file", "/dev/zero"])?,
        "larger than 256 MiB",
    )?;
    let empty = node.bindguard(["journal", "--file", &files.path("empty")])?;
    ensure!(
        empty.code() == 0 && empty.stdout.starts_with("0 creates"),
        "{empty:?}"
    );
    refused(
        &unprivileged(node, &["journal", "--file", &files.path("secret")])?,
        ": run it as root",
    )
}

/// Issue 16: what only root can see is not taken for absent, and the advice is to become root.
fn without_privilege(node: &Node) -> Result<()> {
    for verb in [
        &["repair", "--all"][..],
        &["refresh", "--pod", "default/web"],
        &["refresh", "--container", "c1", "--dry-run"],
        &["release", "/mnt"],
        &["release", "/mnt", "--dry-run", "--json"],
    ] {
        let ended = unprivileged(node, verb)?;
        refused(&ended, "this needs root").with_context(|| format!("{verb:?}"))?;
    }
    // 1 for the stale subPath of this node
    let doctor = unprivileged(node, &["doctor"])?;
    ensure!(
        doctor.code() == 1 && doctor.stdout.contains("only root may read its arguments"),
        "{doctor:?}"
    );
    let status = unprivileged(node, &["status"])?;
    ensure!(
        status.code() == 2 && status.stdout.contains("only root may read its arguments"),
        "{status:?}"
    );
    Ok(())
}

fn command_lines(node: &Node) -> Result<()> {
    let gone = gone_process()?;
    for (words, said) in [
        (&["holders", "/nowhere"][..], "open /nowhere"),
        (&["holders", "/", "--proc", "/nowhere"], "/nowhere"),
        (&["holders", &format!("/proc/{gone}/root")], "No such file"),
        (
            &["repair", &format!("/proc/{gone}/root")],
            "is not a volume-subpath",
        ),
        (
            &["diagnose", "--pod", "no-such-pod"],
            "is it another node's?",
        ),
        (&["release", "nowhere"], "by an absolute path without .."),
        (
            &["release", "/nowhere/../mnt"],
            "by an absolute path without ..",
        ),
        (&["release", "/dev/nowhere"], "open /dev/nowhere"),
        (&["journal", "--since", "soon"], "neither a time"),
        (&["repair"], "nothing is named to repair"),
        (&["repair", "--dry-run"], "nothing is named to repair"),
        (
            &[
                "install",
                "--dry-run",
                "--containerd",
                "/nowhere/containerd",
            ],
            "run /nowhere/containerd",
        ),
        (&["install", "--root", "/nowhere"], "/nowhere"),
        (&["man", "--dir", "/proc/nowhere"], "/proc/nowhere"),
    ] {
        refused(&node.bindguard(words)?, said).with_context(|| format!("{words:?}"))?;
    }
    // the command line's own complaints have lines of usage below the first
    for (words, said) in [
        (&["diagnose", "--mountinfo", "/x"][..], "--root <DIR>"),
        (&["repair", "--all", "--pod", "web"], "cannot be used with"),
        // Every id begins with an empty text.
        (&["refresh", "--container", ""], "a value is required"),
        (&["refresh", "--pod", ""], "a value is required"),
        (&["nosuch"], "unrecognized subcommand"),
    ] {
        let ended = node.bindguard(words)?;
        ensure!(
            ended.code() == 2 && ended.stdout.is_empty() && ended.stderr.contains(said),
            "{words:?}: {ended:?}"
        );
    }
    Ok(())
}

/// `bindguard ... | head -1`, and a stdout that was closed: no panic, and the verdict stays the
/// verdict.
fn readers_that_leave(node: &Node) -> Result<()> {
    for verb in [
        "diagnose",
        "diagnose --json --all",
        "doctor",
        "config show",
        "config default",
        "man",
        "completions bash",
        "--help",
    ] {
        let mut shell = node.command("bash")?;
        shell.args([
            "-c",
            &format!("bindguard {verb} | true; exit ${{PIPESTATUS[0]}}"),
        ]);
        let left = run(shell)?;
        ensure!(
            left.code() < 2 || verb == "doctor" && left.code() == 2,
            "{verb} | true: {left:?}"
        );
        let mut shell = node.command("sh")?;
        shell.args(["-c", &format!("bindguard {verb} >&-")]);
        let closed = run(shell)?;
        ensure!(
            !left.stderr.contains("panicked") && !closed.stderr.contains("panicked"),
            "{verb}: {left:?} {closed:?}"
        );
    }
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut command = node.command("bindguard")?;
    command.args(["check", "/nowhere"]).stderr(writer);
    let ended = command.status().context("run bindguard")?;
    ensure!(
        ended.code() == Some(2),
        "stderr without a reader: {ended:?}"
    );
    Ok(())
}

/// The pid of a process that has ended and was waited for.
fn gone_process() -> Result<u32> {
    let mut child = Command::new("true").spawn().context("start true")?;
    let pid = child.id();
    child.wait().context("wait for true")?;
    Ok(pid)
}

fn unprivileged(node: &Node, words: &[&str]) -> Result<Finished> {
    let mut command = node.command("setpriv")?;
    command
        .args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "bindguard",
        ])
        .args(words);
    run(command)
}

fn refused(ended: &Finished, said: &str) -> Result<()> {
    let is_one_line = ended.stderr.lines().count() == 1 && ended.stderr.starts_with("bindguard: ");
    ensure!(
        ended.code() == 2 && is_one_line && ended.stdout.is_empty() && ended.stderr.contains(said),
        "not refused with {said:?}: {ended:?}"
    );
    Ok(())
}
