//! Typical config files of containerd: each file gets the handler without losing anything, and gets
//! its bytes back. Invalid files are refused in a single line, and nothing is changed.

use bindguard_integration::on_every_config_version;
use bindguard_integration::prelude::*;

const RUNC: &str = r#"version = 2 # of containerd's files
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  # the kubelet's driver
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    SystemdCgroup = true
"#;
const NVIDIA: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "nvidia"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
  BinaryName = "nvidia-container-runtime"
"#;
/// Bottlerocket's names, on a node that can be edited.
const SHIMPEI: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "shimpei"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.shimpei]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/containerd/cri-base.json"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.shimpei.options]
  SystemdCgroup = true
  BinaryName = "shimpei"
"#;
/// AKS with containerd 2.
const V2_WITH_SECTIONS_OF_V3: &str = r#"version = 2
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "registry.example.com/pause:3.10"
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
    SystemdCgroup = true
"#;
/// As stargz and other snapshotters document it. containerd 2.1 ignores the name of the snapshotter
/// until this section has a runtime.
const SNAPSHOTTER_ONLY: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "other"
"#;

fn story(generation: Generation) {
    Setup::on(generation).bare().story(|node| {
        for name in ["nvidia-container-runtime", "shimpei"] {
            write_program(&node.programs().join(name), "#!/bin/sh\n")?;
        }
        options_of_the_default(node)?;
        accepted(node, RUNC, &[], &["runtimes.bindguard"])?;
        accepted(
            node,
            "version = 2\n",
            &[],
            &["runtimes.bindguard", "runtimes.runc"],
        )?;
        accepted(node, "", &[], &["runtimes.bindguard", "runtimes.runc"])?;
        accepted(
            node,
            NVIDIA,
            &["--default"],
            &["nvidia-container-runtime", "default_runtime_name"],
        )?;
        accepted(
            node,
            RUNC,
            &["--wrapper"],
            &["bindguard-runtime", "SystemdCgroup"],
        )?;
        accepted(
            node,
            RUNC,
            &["--default"],
            &["default_runtime_name", "runtimes.runc"],
        )?;
        if generation >= Generation::V2_1 {
            let newest = node.newest_config_version()?;
            for version in ["version = 3", &newest] {
                accepted(
                    node,
                    &format!("{version}\n"),
                    &[],
                    &["runtimes.bindguard", "runtimes.runc"],
                )?;
            }
        }
        accepted(
            node,
            SNAPSHOTTER_ONLY,
            &[],
            &["runtimes.bindguard", "runtimes.runc"],
        )?;
        if generation >= Generation::V2_1 {
            let file = file(node, SNAPSHOTTER_ONLY)?;
            let snapshotter = |node| -> Result<Vec<String>> {
                let dump = dump(node, &file)?;
                let lines = dump.lines().filter(|line| line.contains("snapshotter = "));
                Ok(lines.map(|line| line.trim().to_owned()).collect())
            };
            let before = snapshotter(node)?;
            install(node, &file, &[])?.success()?;
            let after = snapshotter(node)?;
            ensure!(after.starts_with(&before[..1]), "{before:?} is {after:?}");
            node.bindguard(["uninstall", "--restart"])?.success()?;
            for words in [&[][..], &["--default"]] {
                let effective = [
                    "runtimes.bindguard",
                    "runtimes.runc",
                    "SystemdCgroup = true",
                ];
                accepted(node, V2_WITH_SECTIONS_OF_V3, words, &effective)?;
            }
            drop_in_of_a_newer_version(node)?;
        }
        no_file(node)?;
        imported(node)?;
        edited_since(node)?;
        let requests = fs::read_to_string(node.programs().join("systemctl.log"))?;
        ensure!(
            requests.lines().all(|words| words == "restart containerd"),
            "requests to systemd: {requests}"
        );
        refused(node)
    });
}

on_every_config_version!(story);

/// Installs into a file with this text, checks containerd's reading of it, and uninstalls again.
fn accepted(node: &Node, text: &str, words: &[&str], effective: &[&str]) -> Result<()> {
    let file = file(node, text)?;
    install(node, &file, words)?
        .success()
        .with_context(|| format!("install into {text:?}"))?;
    let dump = dump(node, &file)?;
    let missing: Vec<_> = effective
        .iter()
        .filter(|part| !dump.contains(**part))
        .collect();
    ensure!(
        missing.is_empty(),
        "{missing:?} is not in force with {}: {dump}",
        fs::read_to_string(&file)?
    );
    // comments and order stay: every line is still there
    let (mut after, edited) = (String::new(), fs::read_to_string(&file)?);
    edited.lines().for_each(|line| after.extend([line, "\n"]));
    let default = |line: &&str| !line.contains("default_runtime_name");
    let lost = text
        .lines()
        .filter(default)
        .find(|line| !after.contains(&format!("{line}\n")));
    ensure!(lost.is_none(), "the line {lost:?} is lost: {after}");
    node.bindguard(["uninstall", "--restart"])?.success()?;
    ensure!(
        fs::read_to_string(&file)? == text,
        "not the bytes that were there"
    );
    Ok(())
}

/// Issue 16: the options that pods need are those of the node's default runtime, whatever its name.
/// `--wrapper` has them, too.
fn options_of_the_default(node: &Node) -> Result<()> {
    let file = file(node, SHIMPEI)?;
    let said = install(node, &file, &["--wrapper"])?.success()?;
    ensure!(said.contains("note     every create fails while"), "{said}");
    let drop_in = node.disk().join("conf.d/zz-bindguard.toml");
    let edited = fs::read_to_string(if drop_in.exists() { &drop_in } else { &file })?;
    let (_, added) = edited
        .split_once("runtimes.bindguard]")
        .context("find the handler")?;
    for setting in [
        "base_runtime_spec = \"/etc/containerd/cri-base.json\"",
        "SystemdCgroup = true",
    ] {
        ensure!(added.contains(setting), "no {setting} in {edited}");
    }
    node.bindguard(["uninstall", "--restart"])?.success()?;
    Ok(())
}

/// A containerd that runs with what is built in.
fn no_file(node: &Node) -> Result<()> {
    let file = node.disk().join("none/config.toml");
    install(node, &file, &[])?.success()?;
    ensure!(dump(node, &file)?.contains("runtimes.bindguard"));
    node.bindguard(["uninstall", "--restart"])?.success()?;
    ensure!(!file.exists(), "the file is still there");
    Ok(())
}

/// A main file that leaves the CRI's section to an import. 1.7 takes all of it from there.
fn imported(node: &Node) -> Result<()> {
    let folder = node.disk().join("conf.d");
    fs::create_dir_all(&folder)?;
    let import = folder.join("10-cri.toml");
    fs::write(&import, RUNC)?;
    let main = file(
        node,
        &format!("version = 2\nimports = [\"{}/*.toml\"]\n", folder.display()),
    )?;
    let before = fs::read(&main)?;
    install(node, &main, &[])?.success()?;
    let dump = dump(node, &main)?;
    ensure!(
        dump.contains("runtimes.bindguard") && dump.contains("SystemdCgroup = true"),
        "{dump}"
    );
    node.bindguard(["uninstall", "--restart"])?.success()?;
    ensure!(
        fs::read(&main)? == before && fs::read_to_string(&import)? == RUNC,
        "not the bytes that were there"
    );
    ensure!(
        folder.read_dir()?.count() == 1,
        "something is left beside {}",
        import.display()
    );
    fs::remove_dir_all(&folder)?;
    Ok(())
}

/// A tool's drop-in of version 3, beside a main file of version 2: containerd ignores the main file's
/// section of the CRI plugin.
fn drop_in_of_a_newer_version(node: &Node) -> Result<()> {
    let folder = node.disk().join("v3.d");
    fs::create_dir_all(&folder)?;
    let of_tool = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.other]\n  runtime_type = \"io.containerd.runc.v2\"\n";
    fs::write(folder.join("99-other.toml"), of_tool)?;
    let imports = format!("imports = [\"{}/*.toml\"]\n", folder.display());
    let text = RUNC.replacen("[plugins", &format!("{imports}[plugins"), 1);
    for words in [&[][..], &["--default"]] {
        let effective = ["runtimes.bindguard", "runtimes.runc", "runtimes.other"];
        accepted(node, &text, words, &effective)?;
    }
    ensure!(folder.read_dir()?.count() == 1, "a drop-in is left");
    fs::remove_dir_all(&folder)?;
    Ok(())
}

/// A later edit of the file is kept.
fn edited_since(node: &Node) -> Result<()> {
    let file = file(node, RUNC)?;
    install(node, &file, &["--default"])?.success()?;
    let mut text = fs::read_to_string(&file)?;
    text.push_str("\n[debug]\n  level = \"warn\" # mine\n");
    fs::write(&file, &text)?;
    install(node, &file, &["--default"])?.success()?;
    let said = node.bindguard(["uninstall", "--restart"])?.success()?;
    ensure!(said.contains("was changed since the install"), "{said}");
    let left = fs::read_to_string(&file)?;
    ensure!(
        left == format!("{RUNC}\n[debug]\n  level = \"warn\" # mine\n"),
        "{left}"
    );
    ensure!(!dump(node, &file)?.contains("bindguard"));
    Ok(())
}

/// A refusal has one line with the cause and the remedy, has exit code 2, and writes nothing.
fn refused(node: &Node) -> Result<()> {
    let disabled = "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
    let kata = NVIDIA.replace("runc.v2", "kata.v2");
    for (text, words, said) in [
        (
            "version = 2\n{{ template \"base\" . }}\n",
            vec![],
            "line 2 is not TOML",
        ),
        ("[plugins.cri]\n", vec![], "is not of version 2, 3 or 4"),
        ("{\"runtimes\": {}}", vec![], "line 1 is not TOML"),
        (disabled, vec![], "disables the CRI plugin"),
        (&kata, vec!["--default"], "guard the runtime \"nvidia\""),
        (
            RUNC,
            vec!["--containerd", "/nowhere/containerd"],
            "run /nowhere/containerd",
        ),
        (RUNC, vec!["--containerd", "/bin/true"], "find a version"),
        (RUNC, vec!["--prefix", "/sys/bindguard"], "/sys/bindguard"),
        (
            RUNC,
            vec!["--root", "/nowhere"],
            "make /nowhere the root directory",
        ),
    ] {
        let file = file(node, text)?;
        let done = install(node, &file, &words)?;
        ensure!(done.code() == 2, "{words:?} with {text:?}: {done:?}");
        ensure!(
            done.stderr.lines().count() == 1 && done.stderr.contains(said),
            "{words:?} with {text:?}: {}",
            done.stderr
        );
        ensure!(
            fs::read_to_string(&file)? == text,
            "{words:?}: the file was changed"
        );
        let installed = Path::new("/usr/local/bin/bindguard-runtime");
        ensure!(
            !installed.exists(),
            "{words:?}: the programs were put in place"
        );
    }
    Ok(())
}

fn file(node: &Node, text: &str) -> Result<PathBuf> {
    let file = node.disk().join("people's config.toml");
    fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
    Ok(file)
}

fn install(node: &Node, file: &Path, words: &[&str]) -> Result<Finished> {
    let file = file.display().to_string();
    node.bindguard([&["install", "--containerd-config", &file], words].concat())
}

fn dump(node: &Node, file: &Path) -> Result<String> {
    let mut command = node.command("containerd")?;
    command.arg("--config").arg(file).args(["config", "dump"]);
    run(command)?.success()
}
