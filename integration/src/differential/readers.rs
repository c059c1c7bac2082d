//! The programs' answers to texts: specs, configs, mount tables, files of runtimes; and their own
//! texts.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::inputs::{self, Input, Inputs, files_below};
use super::{Cases, Recorder, volatile};
use crate::bundle::Bundle;
use crate::doc_commands::repository;
use crate::journal::JOURNAL;
use crate::node::Setup;
use crate::node_image::NodeImage;
use crate::process::{LIMIT, host, run, run_with_bytes};
use crate::programs::{AGENT, CLI, GUARD, Generation, SHIM};

pub(super) const PARTS: [&str; 4] = ["specs", "texts", "containerd 1.7", "containerd 2.1"];

/// No probe of a case may run out of time on a busy machine.
const CONFIG: &str = "[guard]\ndeadline-ms = 60000\n";

/// The node's files do not decide what a policy does.
const STRICT: &str = "[guard]\ndeadline-ms = 60000\nfailed-repairs = \"refuse\"\n[checks]\n\
    unmounted-volumes = \"refuse\"\ndead-sources = \"refuse\"\nproof = \"refuse\"\n\
    vanished-directories = \"remake\"\n[host-root]\nscope = \"any-submounts\"\nread-only = \"keep\"\n\
    [annotations]\nmode = true\npropagation = true\n";
const REPORT: &str = "[guard]\ndeadline-ms = 60000\n[checks]\nstale-subpaths = \"report\"\n\
    host-root = \"report\"\n";

pub(super) fn play(part: &str, specs: Option<&Path>) -> Result<Cases> {
    let inputs = inputs::read(specs)?;
    let generation = match part {
        "containerd 1.7" => Generation::V1_7,
        _ => Generation::NEWEST,
    };
    let node = Setup::on(generation).bare().start()?;
    let mut recorder = Recorder::on(&node)?;
    match part {
        "specs" => recorder.specs(&inputs.json)?,
        "texts" => {
            recorder.own_texts()?;
            recorder.configs(&inputs.configs)?;
            recorder.mount_tables(&inputs.mount_tables)?;
            recorder.daemon_json(&inputs.json)?;
        }
        _ => recorder.runtime_files(&inputs, generation)?,
    }
    Ok(recorder.cases)
}

impl Recorder<'_> {
    /// `check` of a bundle, the hook, and a create with a runtime that keeps what it got.
    fn specs(&mut self, specs: &[Input]) -> Result<()> {
        let disk = self.node.disk();
        let mut journal = Vec::new();
        let mut configs = Vec::new();
        for (name, text) in [("", CONFIG), (" strict", STRICT), (" report", REPORT)] {
            let file = disk.join(format!("policy{name}.toml"));
            fs::write(&file, text).context("write a policy")?;
            configs.push((name, file.display().to_string()));
        }
        for spec in specs {
            for (policy, config) in &configs {
                let bundle = Bundle::create(self.node, "b", &spec.bytes)?;
                let at = bundle.path().display().to_string();
                let variables = [("BINDGUARD_CONFIG", config.as_str())];
                if policy.is_empty() {
                    let name = |verb: &str| format!("spec {}: {verb}", spec.name);
                    self.cli_with(&name("check"), &["check", &at], &variables)?;
                    self.cli_with(&name("check --json"), &["check", "--json", &at], &variables)?;
                    self.hook(&name("hook precreate"), &variables, &spec.bytes)?;
                }
                self.create(&spec.name, policy, &variables, &bundle, &spec.bytes)?;
                journal.extend(fs::read(JOURNAL).unwrap_or_default());
                fs::remove_dir_all("/run/bindguard").context("remove the journal")?;
                fs::remove_dir_all(bundle.path()).context("remove the bundle")?;
            }
        }
        let file = disk.join("journal.jsonl");
        fs::write(&file, &journal).context("write the journal of all creates")?;
        let file = file.display().to_string();
        let first: Value = serde_json::from_slice(
            journal
                .split(|byte| *byte == b'\n')
                .next()
                .unwrap_or_default(),
        )?;
        for more in [
            &[][..],
            &["--all"],
            &["--json"],
            &["--pod", "default/web"],
            &[
                "--since",
                first["time"].as_str().context("the time of a line")?,
            ],
            &["--since", "2099-01-01T00:00:00Z"],
        ] {
            self.cli("journal", &[&["journal", "--file", &file], more].concat())?;
        }
        Ok(())
    }

    fn hook(&mut self, name: &str, variables: &[(&str, &str)], spec: &[u8]) -> Result<()> {
        let mut hook = self.node.command(self.node.under_test().join(CLI))?;
        hook.args(["hook", "precreate"])
            .envs(variables.iter().copied());
        volatile::restart_pids()?;
        let ended = run_with_bytes(hook, spec, LIMIT)?;
        self.ended(name, &ended)
    }

    fn create(
        &mut self,
        name: &str,
        policy: &str,
        variables: &[(&str, &str)],
        bundle: &Bundle,
        spec: &[u8],
    ) -> Result<()> {
        let mut create = self.node.command(self.node.under_test().join(GUARD))?;
        create
            .args(["--log-format", "json", "--log"])
            .arg(bundle.path().join("log.json"));
        create
            .args(["create", "--bundle"])
            .arg(bundle.path())
            .arg("c1");
        create.env("BINDGUARD_RUNTIME", bundle.path().join("recorder"));
        create.envs(variables.iter().copied());
        volatile::restart_pids()?;
        let ended = run(create)?;
        let mut text = format!(
            "exit {}\n{}--- stderr\n{}",
            ended.code(),
            ended.stdout,
            ended.stderr
        );
        for file in ["seen.args", "seen.json", "bindguard-binds.json", "log.json"] {
            let bytes = fs::read(bundle.path().join(file));
            let content = match &bytes {
                Ok(bytes) if file == "seen.json" && bytes == spec => "as it was".into(),
                Ok(bytes) => String::from_utf8_lossy(bytes),
                Err(error) => error.to_string().into(),
            };
            text.push_str(&format!("--- {file}\n{content}\n"));
        }
        let journal = fs::read_to_string(JOURNAL).unwrap_or_default();
        text.push_str(&format!("--- journal\n{journal}"));
        self.add(&format!("spec {name}: create{policy}"), &text)
    }

    /// The help of each verb, the manual, the completions, the versions.
    fn own_texts(&mut self) -> Result<()> {
        let mut verbs = vec![(CLI, Vec::new()), (AGENT, Vec::new())];
        while let Some((program, words)) = verbs.pop() {
            for flag in ["--help", "-h"] {
                let mut command = self.node.command(self.node.under_test().join(program))?;
                command.args(&words).arg(flag);
                let ended = run(command)?;
                if flag == "--help" {
                    // The lists of verbs have several headings.
                    let (lists, _) = ended.stdout.split_once("\nOptions:\n").unwrap_or_default();
                    for line in lists.lines().filter(|line| line.starts_with("  ")) {
                        let verb = line[2..].split(' ').next().unwrap_or_default();
                        if verb != "help" && verb.starts_with(|c: char| c.is_ascii_lowercase()) {
                            verbs.push((program, [&words[..], &[verb.to_owned()]].concat()));
                        }
                    }
                }
                self.ended(
                    &format!("text: {program} {} {flag}", words.join(" ")),
                    &ended,
                )?;
            }
        }
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            self.cli("text", &["completions", shell])?;
        }
        for words in [
            &["--version"][..],
            &["man"],
            &["config", "default"],
            &[],
            &["nosuch"],
        ] {
            self.cli("text", words)?;
        }
        let folder = self.node.disk().join("man");
        let path = folder.display().to_string();
        self.cli("text", &["man", "--dir", &path])?;
        for page in fs::read_dir(&folder).context("list the pages of the manual")? {
            let page = page?;
            let text = fs::read_to_string(page.path()).context("read a page of the manual")?;
            self.add(&format!("text: {}", page.file_name().display()), &text)?;
        }
        for words in [
            &["-v"][..],
            &["-h"],
            &["-info"],
            &["-nosuch"],
            &["nosuch"],
            &["delete"],
            &["-id", "a", "start"],
        ] {
            let mut shim = self.node.command(self.node.under_test().join(SHIM))?;
            shim.args(words).current_dir(self.node.disk());
            volatile::restart_pids()?;
            let ended = run(shim)?;
            self.ended(&format!("text: {SHIM} {}", words.join(" ")), &ended)?;
        }
        for words in [
            &["--version"][..],
            &["state", "c"],
            &["delete", "--force", "c"],
            &["create"],
        ] {
            let mut guard = self.node.command(self.node.under_test().join(GUARD))?;
            guard.args(words).env("BINDGUARD_RUNTIME", "/bin/echo");
            volatile::restart_pids()?;
            let ended = run(guard)?;
            self.ended(&format!("text: {GUARD} {}", words.join(" ")), &ended)?;
        }
        Ok(())
    }

    fn configs(&mut self, configs: &[Input]) -> Result<()> {
        let file = self.node.disk().join("c.toml");
        let path = file.display().to_string();
        for config in configs {
            fs::write(&file, &config.bytes).context("write a config")?;
            for verb in [&["check"][..], &["show"], &["show", "--json"]] {
                let words = [&["--config", &path, "config"], verb].concat();
                let name = format!("config {}: {}", config.name, verb.join(" "));
                self.cli_with(&name, &words, &[])?;
            }
        }
        Ok(())
    }

    fn mount_tables(&mut self, tables: &[Input]) -> Result<()> {
        let (file, root) = (
            self.node.disk().join("mountinfo"),
            self.node.disk().join("empty"),
        );
        fs::create_dir(&root).context("make an empty root")?;
        let (path, root) = (file.display().to_string(), root.display().to_string());
        // The default roots of a kubelet, which are those of the captured tables.
        let variables = [("BINDGUARD_CONFIG", "/dev/null")];
        for table in tables {
            fs::write(&file, &table.bytes).context("write a mount table")?;
            for more in [
                &[][..],
                &["--all"],
                &["--all", "--json"],
                &["--format", "kubediag"],
            ] {
                let words = [&["diagnose", "--mountinfo", &path, "--root", &root], more].concat();
                self.cli_with(
                    &format!("mounts {}: diagnose {}", table.name, more.join(" ")),
                    &words,
                    &variables,
                )?;
            }
        }
        Ok(())
    }

    /// `install docker` into each JSON file of a test.
    fn daemon_json(&mut self, files: &[Input]) -> Result<()> {
        let file = Path::new("/etc/docker/daemon.json");
        fs::create_dir_all("/etc/docker").context("make Docker's folder")?;
        for input in files {
            if input.name.contains("/kubelet-") {
                continue;
            }
            fs::write(file, &input.bytes).context("write a daemon.json")?;
            for flags in [&[][..], &["--default", "--json"]] {
                let words = [&["install", "--dry-run", "docker"], flags].concat();
                let name = format!("daemon.json {}: {}", input.name, words.join(" "));
                self.cli_with(&name, &words, &[])?;
            }
        }
        Ok(())
    }

    /// `install` into each of containerd's files, and into each kind of node.
    fn runtime_files(&mut self, inputs: &Inputs, generation: Generation) -> Result<()> {
        let file = self.node.disk().join("config.toml");
        let path = file.display().to_string();
        for input in &inputs.containerd {
            fs::write(&file, &input.bytes).context("write containerd's file")?;
            let name = format!("{generation} {}", input.name);
            for flags in [&[][..], &["--default"], &["--wrapper", "--json"]] {
                let words = ["install", "--dry-run", "--containerd-config", &path];
                let name = format!("{name}: install --dry-run {}", flags.join(" "));
                self.cli_with(&name, &[&words, flags].concat(), &[])?;
            }
        }
        let roots = repository().join("integration/fixtures/roots");
        let mut names = Vec::new();
        for root in fs::read_dir(&roots).context("list the root file systems")? {
            names.push(root?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        for name in names {
            self.node_image(&roots.join(&name), &name, generation)?;
        }
        Ok(())
    }

    /// Plans, an installation and its removal in the root file system of a node image, with all
    /// files that were written.
    fn node_image(&mut self, files: &Path, name: &str, generation: Generation) -> Result<()> {
        let image =
            NodeImage::lay_out(self.node, &Path::new("/run/images").join(name), generation)?;
        host(
            ["cp", "-a", "--remove-destination", "-T"]
                .map(Into::into)
                .into_iter()
                .chain([files.into(), image.path("/").into_os_string()]),
        )?;
        let name = format!("{generation} on {name}");
        for words in [
            &[][..],
            &["--default"],
            &["--wrapper", "--json"],
            &["docker", "podman", "crio"],
            &["docker", "podman", "crio", "--default", "--json"],
            &["--containerd-config", "/etc/containerd/config.toml"],
        ] {
            let ended = image.install(&[&["--dry-run"], words].concat())?;
            self.ended(
                &format!("{name}: install --dry-run {}", words.join(" ")),
                &ended,
            )?;
        }
        for (verb, words) in [
            ("install", &["--default"][..]),
            ("install docker podman crio", &[]),
            ("status", &[]),
            ("status --json", &[]),
            ("doctor", &[]),
            ("uninstall", &[]),
            ("uninstall --dry-run", &[]),
        ] {
            let words = [&verb.split(' ').collect::<Vec<_>>(), words].concat();
            volatile::restart_pids()?;
            let ended = match verb.strip_prefix("install") {
                Some(_) => image.install(&words[1..])?,
                None => image.bindguard(&words)?,
            };
            self.ended(&format!("{name}: {}", words.join(" ")), &ended)?;
            if verb.contains("install") {
                let changes = written_below(image.changes())?;
                self.add(
                    &format!("{name}: the files after {}", words.join(" ")),
                    &changes,
                )?;
            }
        }
        Ok(())
    }
}

/// The text of each file below a folder, but of programs.
fn written_below(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for file in files_below(folder)? {
        let name = file.strip_prefix(folder).unwrap_or(&file).display();
        let content = match file.symlink_metadata() {
            Ok(found) if found.is_symlink() => fs::read_link(&file)?.display().to_string(),
            Ok(found) if found.is_file() && found.len() < 1 << 20 => {
                String::from_utf8_lossy(&fs::read(&file)?).into_owned()
            }
            Ok(found) => format!("a program, or {:?}", found.file_type()),
            Err(error) => error.to_string(),
        };
        text.push_str(&format!("--- {name}\n{content}\n"));
    }
    Ok(text)
}
