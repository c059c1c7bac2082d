//! A program of bindguard's is truncated, or is for another architecture. No file of containerd is
//! changed for such programs, and `doctor`, `status` and the readiness of the installer report a
//! program that is damaged later: each create would fail.

use bindguard_integration::prelude::*;

const CONFIG: &str = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n";
const NAMES: [&str; 2] = ["containerd-shim-bindguard-v2", "bindguard-runtime"];
const DAMAGES: [Damage; 3] = [Damage::Truncated, Damage::OfArm64, Damage::Empty];

#[derive(Clone, Copy, Debug)]
enum Damage {
    Truncated,
    OfArm64,
    Empty,
}

#[test]
fn they_are_not_installed() {
    on(|node, file| {
        for name in NAMES {
            let program = node.under_test().join(name);
            let good = fs::read(&program)?;
            for damage in DAMAGES {
                replace(&program, &damaged(&good, damage))?;
                let refused = install(node, file, &[])?;
                let what = format!("{name}, {damage:?}: {refused:?}");
                ensure!(
                    refused.code() == 2 && refused.stderr.contains(name),
                    "{what}"
                );
                ensure!(fs::read_to_string(file)? == CONFIG, "{what}");
                ensure!(!Path::new("/usr/local/bin").join(name).exists(), "{what}");
            }
            replace(&program, &good)?;
        }
        install(node, file, &[])?.success()?;
        node.bindguard(["uninstall", "--restart"])?.success()?;
        Ok(())
    });
}

/// An upgrade to programs that cannot run leaves the present version selected.
#[test]
fn an_upgrade_to_them_changes_nothing() {
    on(|node, file| {
        install(node, file, &[])?.success()?;
        let current = fs::read_link("/usr/local/lib/bindguard/current")?;
        let program = node.under_test().join(NAMES[1]);
        let good = fs::read(&program)?;
        replace(&program, &damaged(&good, Damage::OfArm64))?;
        let refused = install(node, file, &[])?;
        ensure!(refused.code() == 2, "{refused:?}");
        ensure!(fs::read_link("/usr/local/lib/bindguard/current")? == current);
        Ok(())
    });
}

#[test]
fn they_are_damaged_later() {
    on(|node, file| {
        for name in NAMES {
            for damage in DAMAGES {
                install(node, file, &[])?.success()?;
                let program = installed(name)?;
                let good = fs::read(&program)?;
                replace(&program, &damaged(&good, damage))?;
                is_reported(node, file, name).with_context(|| format!("{name}, {damage:?}"))?;
                install(node, file, &[])?.success()?;
                let healed = installed(name)?;
                ensure!(healed != program, "the damaged file is still selected");
                ensure!(fs::read(healed)? == good, "{name} is not as it was");
                node.bindguard(["uninstall", "--restart"])?.success()?;
            }
        }
        Ok(())
    });
}

/// The bytes are other ones, and the program runs.
#[test]
fn another_program_takes_the_place() {
    on(|node, file| {
        install(node, file, &[])?.success()?;
        let program = installed(NAMES[1])?;
        let mut bytes = fs::read(&program)?;
        bytes.extend(b"more");
        replace(&program, &bytes)?;
        is_reported(node, file, NAMES[1])
    });
}

fn is_reported(node: &Node, file: &Path, name: &str) -> Result<()> {
    let probe = install(node, file, &["--dry-run"])?;
    ensure!(probe.code() != 0, "the node is ready: {probe:?}");
    let doctor = node.bindguard(["doctor"])?;
    ensure!(
        doctor.code() == 1 && doctor.stdout.contains(&format!("{name} is damaged")),
        "{doctor:?}"
    );
    let status = node.bindguard(["status"])?;
    ensure!(
        status.code() != 0 && status.stdout.contains(&format!("{name} is damaged")),
        "{status:?}"
    );
    Ok(())
}

fn on(story: impl FnOnce(&Node, &Path) -> Result<()>) {
    Setup::on(Generation::V1_7).bare().story(|node| {
        // an installer finds the other programs beside its own file, and not beside a link
        for name in ["bindguard", NAMES[1]] {
            let program = node.under_test().join(name);
            replace(&program, &fs::read(&program)?)?;
        }
        let file = node.disk().join("config.toml");
        fs::write(&file, CONFIG)?;
        story(node, &file)
    });
}

fn install(node: &Node, file: &Path, words: &[&str]) -> Result<Finished> {
    let file = file.display().to_string();
    node.bindguard([&["install", "--containerd-config", &file], words].concat())
}

/// The file behind the links of an installed program.
fn installed(name: &str) -> Result<PathBuf> {
    Ok(Path::new("/usr/local/bin").join(name).canonicalize()?)
}

/// Other names of the file keep its content: the tests share their programs. Another process writes
/// the file, because a child of a parallel test may keep a descriptor that this process writes to,
/// and then the program cannot be run.
fn replace(program: &Path, bytes: &[u8]) -> Result<()> {
    let (text, new) = (
        program.with_extension("text"),
        program.with_extension("new"),
    );
    fs::write(&text, bytes)?;
    let mut copy = Command::new("install");
    copy.arg("--mode=755").arg(&text).arg(&new);
    run(copy)?.success()?;
    fs::remove_file(&text)?;
    fs::rename(&new, program).with_context(|| format!("replace {}", program.display()))
}

fn damaged(good: &[u8], damage: Damage) -> Vec<u8> {
    match damage {
        Damage::Truncated => good[..good.len() / 2].to_vec(),
        Damage::OfArm64 => {
            // e_machine of elf(5): EM_AARCH64
            let mut bytes = good.to_vec();
            bytes[18..20].copy_from_slice(&183_u16.to_le_bytes());
            bytes
        }
        Damage::Empty => Vec::new(),
    }
}
