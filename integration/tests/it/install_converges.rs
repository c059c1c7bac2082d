//! `install` converges to the options that it is given, from any state that an earlier
//! install left. A fleet is rolled out with `--default`, and the mind is changed; the kubelet's
//! cgroup driver changes; the files are as a fresh install makes them.

use bindguard_integration::prelude::*;
use std::os::unix::fs::MetadataExt;

use bindguard_integration::on_every_config_version;

const V2: &str = r#"version = 2 # of containerd's files
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "mine" # not runc
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.mine]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.mine.options]
    SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/opt/cni"
"#;
/// The Amazon AMI for containerd 2 mixes the quotes.
const V3: &str = r#"version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
[ plugins."io.containerd.cri.v1.runtime".cni ]
bin_dirs = ["/opt/cni"]
"#;
const OPTIONS: [&[&str]; 4] = [
    &[],
    &["--default"],
    &["--wrapper"],
    &["--default", "--wrapper"],
];

/// A walk through [`OPTIONS`] from the first options: each change between two options occurs once.
const EVERY_CHANGE: [usize; 12] = [1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0];

fn story(generation: Generation) {
    Setup::on(generation).bare().story(|node| {
        let file = node.disk().join("config.toml");
        if generation < Generation::V2_1 {
            return converges(node, &file, V2, &file);
        }
        let drop_in = node.disk().join("conf.d/zz-bindguard.toml");
        converges(node, &file, V3, &drop_in)?;
        fs::create_dir_all(node.disk().join("conf.d"))?;
        let main = format!("imports = [\"conf.d/*.toml\"]\n{V3}");
        converges(node, &file, &main, &drop_in)
    });
}

on_every_config_version!(story);

/// `edited`: the file that an install edits or makes.
fn converges(node: &Node, main: &Path, text: &str, edited: &Path) -> Result<()> {
    fs::write(main, text)?;
    let mut fresh = Vec::new();
    for options in OPTIONS {
        install(node, main, options)?.success()?;
        fresh.push(fs::read_to_string(edited)?);
        node.bindguard(["uninstall", "--restart"])?.success()?;
        ensure!(
            fs::read_to_string(main)? == text,
            "not the bytes that were there"
        );
    }
    let mut from = OPTIONS[0];
    install(node, main, from)?.success()?;
    for (to, expected) in EVERY_CHANGE.map(|index| (OPTIONS[index], &fresh[index])) {
        let look = install(node, main, &[to, &["--dry-run"][..]].concat())?;
        ensure!(
            look.code() == 1 && look.stdout.contains("\n@@ "),
            "{from:?} to {to:?}: no diff: {look:?}"
        );
        install(node, main, to)?.success()?;
        let now = fs::read_to_string(edited)?;
        ensure!(
            now == *expected,
            "{from:?} to {to:?} gives\n{now}\nand not\n{expected}"
        );
        from = to;
    }
    // the kubelet's driver changes after `install --default`
    install(node, main, &["--default"])?.success()?;
    let before = fs::read_to_string(main)?;
    let changed = before.replacen("SystemdCgroup = false", "SystemdCgroup = true", 1);
    fs::write(main, &changed)?;
    install(node, main, &["--default"])?.success()?;
    let dump = dump(node, main)?;
    ensure!(
        dump.matches("SystemdCgroup = true").count() == 2,
        "the handler has the old driver: {dump}"
    );
    node.bindguard(["uninstall", "--restart"])?.success()?;
    let wanted = text.replacen("SystemdCgroup = false", "SystemdCgroup = true", 1);
    ensure!(
        fs::read_to_string(main)? == wanted,
        "{}",
        fs::read_to_string(main)?
    );
    ensure!(edited == main || !edited.exists(), "the drop-in is left");
    Ok(())
}

/// The readiness probe of the installer's pod is a dry run, twice a minute.
#[test]
fn a_dry_run_writes_nothing() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let folder = node.disk().join("etc");
        fs::create_dir(&folder)?;
        let main = folder.join("config.toml");
        fs::write(&main, V3)?;
        let changed =
            |path: &PathBuf| fs::metadata(path).map(|found| (found.mtime(), found.mtime_nsec()));
        let before = changed(&folder)?;
        ensure!(install(node, &main, &["--dry-run"])?.code() == 1);
        ensure!(
            changed(&folder)? == before,
            "a file was made in the runtime's folder, and removed"
        );
        install(node, &main, &[])?.success()?;
        let before = changed(&folder)?;
        ensure!(install(node, &main, &["--dry-run"])?.code() == 0);
        ensure!(
            changed(&folder)? == before,
            "a file was made in the runtime's folder, and removed"
        );
        fs::write(
            &main,
            fs::read_to_string(&main)?.replace("/opt/cni", "/usr/lib/cni"),
        )?;
        ensure!(install(node, &main, &["--dry-run"])?.code() == 0);
        node.bindguard(["uninstall", "--restart"])?.success()?;
        Ok(())
    });
}

#[test]
fn docker_gets_its_default_back() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        let file = Path::new("/etc/docker/daemon.json");
        fs::create_dir_all("/etc/docker")?;
        let text =
            "{\n  \"default-runtime\": \"mine\",\n  \"runtimes\": {\"mine\": {\"path\": \"/bin/sh\"}}\n}\n";
        fs::write(file, text)?;
        node.bindguard(["install", "docker"])?.success()?;
        let fresh = fs::read_to_string(file)?;
        node.bindguard(["install", "docker", "--default"])?.success()?;
        ensure!(fs::read_to_string(file)?.contains("\"default-runtime\": \"bindguard\""));
        let said = node.bindguard(["install", "docker"])?.success()?;
        ensure!(said.contains("systemctl restart docker"), "a reload keeps the default: {said}");
        ensure!(fs::read_to_string(file)? == fresh, "{}", fs::read_to_string(file)?);
        node.bindguard(["uninstall", "--restart"])?.success()?;
        ensure!(fs::read_to_string(file)? == text, "not the bytes that were there");
        Ok(())
    });
}

/// CRI-O's own packages bring crun, and Docker's bring runc.
#[test]
fn two_runtimes_that_call_different_oci_runtimes() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        fs::create_dir_all("/etc/crio/crio.conf.d")?;
        let crun = node.disk().join("crun");
        write_program(&crun, "#!/bin/sh\n")?;
        let packaged = format!(
            "[crio.runtime]\ndefault_runtime = \"crun\"\n\
             [crio.runtime.runtimes.crun]\nruntime_path = {crun:?}\n"
        );
        fs::write("/etc/crio/crio.conf.d/10-crio.conf", packaged)?;
        let refused = |words: &[&str], why: &str| {
            let refused = node.bindguard(words)?;
            ensure!(
                refused.code() == 2 && refused.stderr.contains(why),
                "{words:?}: {refused:?}"
            );
            ensure!(!fs::exists("/etc/crio/crio.conf.d/zz-bindguard.conf")?);
            Ok(())
        };
        refused(
            &["install", "docker", "crio"],
            &format!("docker uses runc, and crio uses {}", crun.display()),
        )?;
        node.bindguard(["install", "docker"])?.success()?;
        refused(
            &["install", "crio"],
            &format!("crio uses {}, and docker uses runc", crun.display()),
        )?;
        node.bindguard(["uninstall", "docker"])?.success()?;
        node.bindguard(["install", "crio"])?.success()?;
        node.bindguard(["uninstall", "--restart"])?.success()?;
        Ok(())
    });
}

fn install(node: &Node, file: &Path, words: &[&str]) -> Result<Finished> {
    let file = file.display().to_string();
    node.bindguard([&["install", "--containerd-config", &file], words].concat())
}

fn dump(node: &Node, file: &Path) -> Result<String> {
    let mut command = node.command("containerd")?;
    command.arg("--config").arg(file).args(["config", "dump"]);
    run(command)
        .context("run containerd config dump")?
        .success()
}
