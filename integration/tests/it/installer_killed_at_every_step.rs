//! Issue 16: `install` and `uninstall` are killed at their changes to the file system: at every
//! change in `make soak`, at every sixth change in `make test`. After each kill a pod starts,
//! before and after a restart of containerd. The next `uninstall` leaves every byte as it was.
//!
//! strace(1) kills the process as it enters the call. Files are written beside their places, so
//! renames are the changes.

use bindguard_integration::prelude::*;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;

use bindguard_integration::privilege;
use bindguard_integration::programs::{AGENT, SHIM};
use bindguard_testing::rounds;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

const CHANGES: &str = "rename,renameat,renameat2,unlink,unlinkat,symlink,symlinkat,mkdir,rmdir";

#[test]
fn install() {
    story(Generation::NEWEST, |node, before| {
        at_every_step(node, &["install", "--default"], || {
            pod_starts(node)?;
            node.restart_containerd(Signal::SIGTERM)?;
            pod_starts(node)?;
            node.bindguard(["uninstall"])?;
            node.restart_containerd(Signal::SIGTERM)?;
            uninstalled(node, before)
        })
    });
}

/// The file keeps its time, too: a tool that watches the file sees no change.
#[test]
fn install_and_then_again() {
    story(Generation::NEWEST, |node, before| {
        at_every_step(node, &["install", "--default"], || {
            node.bindguard(["install", "--default"])?.success()?;
            node.restart_containerd(Signal::SIGTERM)?;
            node.bindguard(["install"])?.success()?;
            node.restart_containerd(Signal::SIGTERM)?;
            node.bindguard(["uninstall"])?;
            node.restart_containerd(Signal::SIGTERM)?;
            uninstalled(node, before)
        })
    });
}

#[test]
fn uninstall_from_the_files() {
    story(Generation::V1_7, |node, before| {
        let prepare = || {
            node.bindguard(["install", "--default"])?.success()?;
            node.restart_containerd(Signal::SIGTERM)
        };
        prepare()?;
        at_every_step(node, &["uninstall"], || {
            pod_starts(node)?;
            ensure!(
                Path::new("/usr/local/bin/bindguard-runtime").exists(),
                "the running containerd names the programs"
            );
            node.restart_containerd(Signal::SIGTERM)?;
            pod_starts(node)?;
            node.bindguard(["uninstall"])?;
            node.restart_containerd(Signal::SIGTERM)?;
            uninstalled(node, before)?;
            prepare()
        })
    });
}

#[test]
fn uninstall_of_the_programs() {
    story(Generation::V1_7, |node, before| {
        let prepare = || {
            node.bindguard(["install"])?.success()?;
            node.bindguard(["uninstall"])?;
            node.restart_containerd(Signal::SIGTERM)
        };
        prepare()?;
        at_every_step(node, &["uninstall"], || {
            pod_starts(node)?;
            uninstalled(node, before)?;
            prepare()
        })
    });
}

/// Another build replaces the link to the version, and a config of the fleet the node's. Before the
/// replacement the record already names the new content.
#[test]
fn upgrade() {
    story(Generation::NEWEST, |node, before| {
        let second = node.disk().join("second");
        fs::create_dir(&second)?;
        // The installer runs the programs: a program that any process has open for writing cannot be
        // run, so a separate process makes the copies.
        let programs = [SHIM, GUARD, CLI, AGENT].map(|name| node.under_test().join(name));
        let mut copy = Command::new("sh");
        copy.args([
            "-c",
            "to=$1 && shift && cp \"$@\" $to && printf ' ' >> $to/bindguard-runtime",
        ]);
        copy.arg("sh").arg(&second).args(programs);
        run(copy)?.success()?;
        let config = Path::new("/etc/bindguard/config.toml");
        let fleet = node.disk().join("fleet.toml");
        let named = format!("--node-config={}", fleet.display());
        let prepare = || {
            fs::write(&fleet, "guard.deadline-ms = 500\n")?;
            node.bindguard(["install", &named])?.success()?;
            fs::write(&fleet, "guard.deadline-ms = 600\n")?;
            node.restart_containerd(Signal::SIGTERM)
        };
        prepare()?;
        at_every_step_of(
            node,
            &second.join(CLI),
            &["install", "--default", &named],
            || {
                node.bindguard(["uninstall"])?;
                node.restart_containerd(Signal::SIGTERM)?;
                uninstalled(node, before)?;
                ensure!(!fs::exists(config)?, "the config of the fleet is left");
                prepare()
            },
        )
    });
}

/// A file of a killed installer is removed before the folders that an install made.
#[test]
fn files_beside_every_changed_file() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        node.bindguard(["install", "docker"])?.success()?;
        let version = Path::new("/usr/local/lib/bindguard")
            .join(fs::read_link("/usr/local/lib/bindguard/current")?);
        let folders = [
            Path::new("/etc/docker"),
            Path::new("/etc/bindguard"),
            Path::new("/usr/local/bin"),
            Path::new("/usr/local/lib/bindguard"),
            &version,
        ];
        let left = folders.map(|folder| folder.join(".bindguard-4294967295-x"));
        left.iter().try_for_each(|file| fs::write(file, ""))?;
        node.bindguard(["uninstall", "--restart"])?.success()?;
        for path in left
            .iter()
            .map(PathBuf::as_path)
            .chain([folders[1], folders[3]])
        {
            ensure!(
                path.symlink_metadata().is_err(),
                "{} is left",
                path.display()
            );
        }
        Ok(())
    });
}

fn story(generation: Generation, steps: impl Fn(&Node, &[u8]) -> Result<()>) {
    if !privilege::has_program("strace") {
        return privilege::skipped("no strace");
    }
    Setup::on(generation).cri().bare().story(|node| {
        let file = node.containerd_config();
        let before = fs::read(file)?;
        let time = Timespec {
            tv_sec: 1_000_000_000,
            tv_nsec: 5,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        utimensat(CWD, file, &times, AtFlags::empty())?;
        steps(node, &before)
    });
}

fn at_every_step(node: &Node, words: &[&str], check: impl Fn() -> Result<()>) -> Result<()> {
    at_every_step_of(node, &node.under_test().join(CLI), words, check)
}

/// Runs bindguard with these arguments again and again, killed at each change in turn, and `check`
/// after each run.
fn at_every_step_of(
    node: &Node,
    program: &Path,
    words: &[&str],
    check: impl Fn() -> Result<()>,
) -> Result<()> {
    for step in (1..).step_by(rounds(6, 1)) {
        let mut command = node.command("strace")?;
        command.args([
            "-qq",
            "-e",
            &format!("trace={CHANGES}"),
            "-e",
            &format!("inject={CHANGES}:signal=SIGKILL:when={step}"),
        ]);
        command
            .arg("-o")
            .arg(node.disk().join("steps"))
            .arg(program)
            .args(words);
        let ended = run(command)?;
        if ended.code() != 137 {
            ensure!(step > 3, "{words:?} made no change: {ended:?}");
            return Ok(());
        }
        check()
            .map_err(|error| error.context(format!("{words:?} was killed at its change {step}")))?;
    }
    Ok(())
}

fn pod_starts(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let sandbox = cri.run_pod("", "killed", "killed")?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &[])?;
    cri.remove_pod(&sandbox)
}

/// A shim ends a moment after its last container.
fn uninstalled(node: &Node, before: &[u8]) -> Result<()> {
    until("nothing needs the programs", || {
        Ok(node.bindguard(["uninstall"])?.code() == 0)
    })?;
    ensure!(
        fs::read(node.containerd_config())? == before,
        "not the bytes that were there"
    );
    let changed = fs::metadata(node.containerd_config())?.mtime();
    ensure!(changed == 1_000_000_000, "changed at {changed}");
    for left in [
        "/usr/local/bin/bindguard-runtime",
        "/usr/local/lib/bindguard",
        "/etc/bindguard",
        "/var/lib/bindguard",
    ] {
        ensure!(
            Path::new(left).symlink_metadata().is_err(),
            "{left} is left"
        );
    }
    let beside = |folder: &str| -> Result<Vec<OsString>> {
        let entries = Path::new(folder).read_dir()?.flatten();
        Ok(entries.map(|entry| entry.file_name()).collect())
    };
    let mut strange = beside("/etc/containerd")?;
    strange.retain(|name| name != "config.toml");
    let mut scratch = beside("/usr/local/bin")?;
    scratch.retain(|name| name.to_string_lossy().starts_with(".bindguard-"));
    ensure!(
        strange.is_empty() && scratch.is_empty(),
        "left: {strange:?} {scratch:?}"
    );
    Ok(())
}
