//! `--default` beside other drop-ins. GPU toolkits write `99-nvidia.toml` and `99-nvidia.conf`, which
//! a runtime reads after a file `50-bindguard`. bindguard's file is read last; where a still later
//! file names the default, `install --default` fails.

use bindguard_integration::prelude::*;

const SECTION: &str = "plugins.\"io.containerd.cri.v1.runtime\".containerd";
const CRIO: &str = "/etc/crio/crio.conf.d";
const PODMAN: &str = "/etc/containers/containers.conf.d";

#[test]
fn a_toolkit_that_was_there_before() {
    on_containerd(|scene| {
        scene.write_default("99-nvidia.toml")?;
        scene.install(&["--default"])?.success()?;
        scene.default_is("bindguard")?;
        scene.uninstalled()?;
        scene.default_is("nvidia")
    });
}

#[test]
fn a_toolkit_that_comes_later() {
    on_containerd(|scene| {
        scene.install(&["--default"])?.success()?;
        scene.write_default("99-nvidia.toml")?;
        scene.default_is("bindguard")?;
        scene.install(&["--default"])?.success()?;
        scene.default_is("bindguard")?;
        scene.uninstalled()?;
        scene.default_is("nvidia")
    });
}

/// A person's own file that is to be read last. The folder of the drop-ins has no earlier file.
#[test]
fn a_still_later_file() {
    on_containerd(|scene| {
        let file = scene.write_default("zzz-mine.toml")?;
        let refused = scene.install(&["--default"])?;
        ensure!(
            refused.code() != 0 && refused.stderr.contains(&file.display().to_string()),
            "{refused:?}"
        );
        scene.default_is("nvidia")?;
        ensure!(!Path::new("/usr/local/bin/bindguard-runtime").exists());
        scene.install(&[])?.success()?;
        scene.uninstalled()
    });
}

/// A later pattern of the main file is read after all files of the first one.
#[test]
fn a_folder_that_is_imported_later() {
    on_containerd(|scene| {
        let second = scene.node.disk().join("second.d");
        fs::create_dir_all(&second)?;
        let text = fs::read_to_string(&scene.file)?;
        let text = text.replace("conf.d/*.toml\"", "conf.d/*.toml\", \"second.d/*.toml\"");
        fs::write(&scene.file, text)?;
        fs::rename(
            scene.write_default("10-nvidia.toml")?,
            second.join("10-nvidia.toml"),
        )?;
        scene.default_is("nvidia")?;
        scene.install(&["--default"])?.success()?;
        scene.default_is("bindguard")?;
        scene.uninstalled()?;
        scene.default_is("nvidia")
    });
}

/// A drop-in of another version of the file loses settings of the main file (containerd#12891).
#[test]
fn the_drop_in_has_the_main_files_version() {
    on_containerd(|scene| {
        let folder = scene.node.disk().join("conf.d");
        let plugin = "plugins.\"io.containerd.grpc.v1.cri\"";
        let text = format!(
            "version = 2\nimports = [\"{}/*.toml\"]\n[{plugin}]\n  sandbox_image = \"own/pause:1\"\n",
            folder.display()
        );
        for version in [2, 3] {
            let text = match version {
                2 => text.clone(),
                _ => fs::read_to_string(&scene.file)?,
            };
            fs::write(&scene.file, &text)?;
            scene.install(&["--default"])?.success()?;
            scene.default_is("bindguard")?;
            if version == 2 {
                let dump = scene.dump()?;
                ensure!(dump.contains("own/pause:1"), "{dump}");
            }
            scene.uninstalled()?;
        }
        Ok(())
    });
}

#[test]
fn crio() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        let program = toolkit(node)?;
        fs::create_dir_all(CRIO)?;
        let text = format!(
            "[crio.runtime]\ndefault_runtime = \"nvidia\"\n[crio.runtime.runtimes.nvidia]\nruntime_path = {program:?}\n"
        );
        in_order(node, "crio", CRIO, "default_runtime", &text)
    });
}

#[test]
fn podman() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        let program = toolkit(node)?;
        fs::create_dir_all(PODMAN)?;
        let text =
            format!("[engine]\nruntime = \"nvidia\"\n[engine.runtimes]\nnvidia = [{program:?}]\n");
        in_order(node, "podman", PODMAN, "runtime", &text)
    });
}

/// The last file that names the default wins.
fn in_order(node: &Node, engine: &str, folder: &str, key: &str, nvidia: &str) -> Result<()> {
    let wins = |wanted: &str| {
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(folder)? {
            files.push(entry?.path());
        }
        files.sort();
        let mut found = String::new();
        for file in files {
            let text = fs::read_to_string(file)?;
            let line = text
                .lines()
                .find(|line| line.starts_with(&format!("{key} = ")));
            if let Some(line) = line {
                line.clone_into(&mut found);
            }
        }
        ensure!(
            found.contains(&format!("\"{wanted}\"")),
            "the default is {found:?}, not {wanted:?}"
        );
        Ok(())
    };
    let toolkits = Path::new(folder).join("99-nvidia.conf");
    fs::write(&toolkits, nvidia)?;
    node.bindguard(["install", engine, "--default"])?
        .success()?;
    wins("bindguard")?;
    let last = Path::new(folder).join("zzz-mine.conf");
    fs::rename(&toolkits, &last)?;
    let refused = node.bindguard(["install", engine, "--default"])?;
    ensure!(
        refused.code() != 0 && refused.stderr.contains(&last.display().to_string()),
        "{refused:?}"
    );
    let doctor = node.bindguard(["doctor"])?;
    ensure!(
        doctor.stdout.contains(&last.display().to_string()),
        "{doctor:?}"
    );
    node.bindguard(["install", engine])?.success()?;
    Ok(())
}

struct Scene<'n> {
    node: &'n Node,
    file: PathBuf,
    program: PathBuf,
}

fn on_containerd(story: impl FnOnce(&Scene<'_>) -> Result<()>) {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let folder = node.disk().join("conf.d");
        fs::create_dir(&folder)?;
        let file = node.disk().join("config.toml");
        let text = format!(
            "version = 3\nimports = [\"{}/*.toml\"]\n[{SECTION}]\n  default_runtime_name = \"runc\"\n[{SECTION}.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n",
            folder.display()
        );
        fs::write(&file, text)?;
        story(&Scene {
            node,
            file,
            program: toolkit(node)?,
        })
    });
}

fn toolkit(node: &Node) -> Result<PathBuf> {
    let program = node.programs().join("nvidia-container-runtime");
    write_program(&program, "#!/bin/sh\n")?;
    Ok(program)
}

impl Scene<'_> {
    /// A drop-in whose default is nvidia.
    fn write_default(&self, name: &str) -> Result<PathBuf> {
        let file = self.node.disk().join("conf.d").join(name);
        let text = format!(
            "version = 3\n[{SECTION}]\n  default_runtime_name = \"nvidia\"\n[{SECTION}.runtimes.nvidia]\n  runtime_type = \"io.containerd.runc.v2\"\n[{SECTION}.runtimes.nvidia.options]\n  BinaryName = {:?}\n",
            self.program
        );
        fs::write(&file, text)?;
        Ok(file)
    }

    fn install(&self, words: &[&str]) -> Result<Finished> {
        let file = self.file.display().to_string();
        self.node
            .bindguard([&["install", "--containerd-config", &file], words].concat())
    }

    fn uninstalled(&self) -> Result<()> {
        self.node.bindguard(["uninstall", "--restart"])?.success()?;
        Ok(())
    }

    fn dump(&self) -> Result<String> {
        let mut command = self.node.command("containerd")?;
        command
            .arg("--config")
            .arg(&self.file)
            .args(["config", "dump"]);
        run(command)?.success()
    }

    fn default_is(&self, wanted: &str) -> Result<()> {
        let dump = self.dump()?;
        let line = dump
            .lines()
            .find(|line| line.contains("default_runtime_name"))
            .context("find the default")?;
        ensure!(line.contains(wanted), "{line}, not {wanted}");
        Ok(())
    }
}
