//! `bindguard VERB --root /host` in a privileged pod with the node's processes: the report is that of
//! the node, and each printed command works where the report says.
//!
//! The pod's image has bindguard's programs and no other.

use bindguard_integration::prelude::*;
use bindguard_integration::programs::{Matrix, SHIM};

/// The argument: a folder of more programs.
const FIRST_PROCESS: &str = r#"
mount --make-rshared / && mount -t overlay -o "lowerdir=$0:/usr/sbin" overlay /usr/sbin
exec sleep 1000000"#;

/// The arguments: the image's folder, and the words.
const POD: &str = r#"
mount --rbind / "$0/host" && mount --rbind /proc "$0/proc"
chroot=$(command -v chroot)
export PATH=/usr/local/bin
exec "$chroot" "$0" "$@""#;

#[test]
fn story() {
    Setup::on(Generation::NEWEST).story(|node| {
        let pod = node.kubelet().pod("uid-web")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        volume.subpath("app", 0, "app.conf").bind()?;
        volume.update(&[("app.conf", "two")])?;
        let data = node.disk().join("data");
        let place = pod
            .path()
            .join("volumes/kubernetes.io~empty-dir/scratch/disk");
        for folder in [&place, &data] {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        host([
            "mount".as_ref(),
            "--bind".as_ref(),
            data.as_os_str(),
            place.as_os_str(),
        ])?;

        let first = FirstProcess::start(node)?;
        let (mut repaired, mut unmounted) = (false, false);
        for verb in ["diagnose", "status", "doctor"] {
            let there = first.in_pod(&[CLI, verb, "--root", "/host"])?;
            let here = first.on_node(&[CLI, verb])?;
            let code = if verb == "doctor" { 1 } else { here.code() };
            ensure!(there.code() == code, "{there:?} {here:?}");
            let said = there.stdout.replace(" --root /host", "");
            let said = said.replace("run on the node: ", "run: ");
            ensure!(
                without_programs(&said) == without_programs(&here.stdout),
                "{there:?} {here:?}"
            );
            ensure!(!said.contains("runc is not found"), "{there:?}");
            for line in there.stdout.lines() {
                let line = line.trim_start();
                if let Some(command) = line.strip_prefix("run: ") {
                    let words: Vec<&str> = command.split(' ').collect();
                    let done = first.in_pod(&words)?;
                    ensure!(done.code() < 2, "{command}: {done:?}");
                    repaired |= command.starts_with("bindguard repair") && done.code() == 0;
                }
                if let Some(command) = line.strip_prefix("run on the node: ") {
                    first.on_node(&["sh", "-c", command])?.success()?;
                    unmounted |= command.starts_with("umount");
                }
            }
        }
        ensure!(repaired && unmounted, "{repaired} {unmounted}");
        let done = first.on_node(&[CLI, "diagnose"])?;
        ensure!(done.code() == 0, "{done:?}");

        let place = node.kubelet().root().display().to_string();
        let there = first.in_pod(&[CLI, "holders", &place, "--root", "/host"])?;
        let here = first.on_node(&[CLI, "holders", &place])?;
        ensure!(there.code() == here.code(), "{there:?} {here:?}");
        let of_pod = format!("/host{place}");
        let there = first.in_pod(&[CLI, "holders", &of_pod, "--root", "/host"])?;
        ensure!(
            there.code() == 2 && there.stderr.contains(&format!("as the node does, {place}")),
            "{there:?}"
        );

        // Without --root, the pod's own files and mounts would look like a bare node.
        for verb in ["diagnose", "status", "doctor"] {
            let there = first.in_pod(&[CLI, verb])?;
            let next = format!("run bindguard {verb} --root /host");
            ensure!(
                there.code() == 2 && there.stdout.is_empty() && there.stderr.contains(&next),
                "{there:?}"
            );
        }

        // The mounts of another root are not the node's.
        let done = first.in_pod(&[CLI, "repair", "--all", "--root", "/host/run"])?;
        ensure!(
            done.code() == 2 && done.stderr.contains("hostPID"),
            "{done:?}"
        );
        Ok(())
    });
}

/// The folder beside `bindguard` has the programs, which are not installed. The folder of the image
/// is no folder of the node.
fn without_programs(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    if let Some(at) = lines.iter().position(|line| line.contains(" programs: ")) {
        lines.remove(at);
        if lines[at].trim_start().starts_with("run: ") {
            lines.remove(at);
        }
        lines.pop();
    }
    lines.join("\n")
}

/// The first process of a node: the stories' nodes have the machine's.
struct FirstProcess<'n> {
    node: &'n Node,
    unshare: Child,
    pid: String,
    image: PathBuf,
}

impl<'n> FirstProcess<'n> {
    fn start(node: &'n Node) -> Result<Self> {
        let image = node.disk().join("image");
        for folder in ["host", "proc", "usr/local/bin"] {
            fs::create_dir_all(image.join(folder))?;
        }
        for name in [SHIM, GUARD, CLI] {
            fs::copy(
                node.under_test().join(name),
                image.join("usr/local/bin").join(name),
            )
            .with_context(|| format!("copy {name}"))?;
        }
        // On the PATH of a service, and not on that of the image.
        let programs = node.disk().join("sbin");
        fs::create_dir(&programs)?;
        let containerd = Matrix::locate()?.program(Generation::NEWEST, "containerd");
        for program in [containerd, node.programs().join("runc")] {
            let name = program.file_name().context("a program's name")?;
            fs::copy(&program, programs.join(name))
                .with_context(|| format!("copy {}", program.display()))?;
        }
        let mut command = node.command("unshare")?;
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["sh", "-ec"])
            .arg(FIRST_PROCESS)
            .arg(&programs)
            .stdout(Stdio::null());
        let unshare = command.spawn().context("start the first process")?;
        let children = format!("/proc/{0}/task/{0}/children", unshare.id());
        let mut pid = String::new();
        until("the first process runs", || {
            pid = fs::read_to_string(&children)?.trim().to_owned();
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Ok(name.trim() == "sleep")
        })?;
        Ok(Self {
            node,
            unshare,
            pid,
            image,
        })
    }

    fn on_node(&self, words: &[&str]) -> Result<Finished> {
        let mut command = self.node.command("nsenter")?;
        command.args(["--target", &self.pid, "--pid", "--mount"]);
        command.args(words);
        run(command)
    }

    fn in_pod(&self, words: &[&str]) -> Result<Finished> {
        let image = self.image.display().to_string();
        let unshare = ["unshare", "--mount", "--propagation", "private"];
        self.on_node(&[&unshare[..], &["sh", "-ec", POD, &image], words].concat())
    }
}

impl Drop for FirstProcess<'_> {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}
