//! bindguard's own files on a node: the programs, with the versions side by side, and the config.
//!
//! ```text
//! /usr/local/bin/containerd-shim-bindguard-v2 ──► /usr/local/lib/bindguard/current/containerd-shim-bindguard-v2
//! /usr/local/lib/bindguard/current            ──► 0.2.0
//! ```
//!
//! Configurations name the link in the prefix. Replacing `current` is a single rename(2), which switches
//! all programs at once. A running shim was started from its version's folder and takes the guard from
//! this folder: an upgrade does not mix versions. The programs to install are opened first, because with
//! `--root` their folder is out of reach afterwards.
//!
//! The commented default config is installed if there is no config. The options of some runtimes
//! name an OCI runtime, and the engine does not pass this name on. Then `runtime.path` must name the
//! OCI runtime. Otherwise a different runtime than before would create the containers.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_config::{Config, DEFAULT_PATH, Loaded, SHIPPED};
use bindguard_core::error_chain;
use bindguard_core::handover::{AGENT, CLI, SHIM, WRAPPER, self_test_of};
use bindguard_operator::root_program::{
    Failed, PROGRAM_FOLDERS, RootProgram, check_folders_of_root, open_of_root, output_of,
};
use rustix::fs::{Access, StatVfsMountFlags, access};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::change::{self, Change, Content, Doing, Owner, digits_of, identity, nearest};
use crate::config_text::with_value;
use crate::record::{self, Record, USUAL_RUNTIME, remove_file};
use crate::running::{daemon_that_names, is_gone, users_of};

#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
    /// The folder's device and inode: in a `--root`, the folder's path leads elsewhere.
    identity: Option<(u64, u64)>,
    files: Vec<OwnProgram>,
    agent: Result<OwnProgram>,
    pub with_agent: bool,
}

impl Programs {
    /// The programs beside this one.
    pub fn beside_this_one(with_agent: bool) -> Result<Self> {
        let own = env::current_exe().context("find out where this program is")?;
        let folder = own.parent().unwrap_or(Path::new("/")).to_owned();
        let open = |name: &'static str| OwnProgram::open(name, &folder.join(name));
        Ok(Self {
            identity: identity(&folder),
            files: vec![open(SHIM)?, open(WRAPPER)?, OwnProgram::open(CLI, &own)?],
            agent: open(AGENT),
            folder,
            with_agent,
        })
    }

    fn files(&self) -> Result<Vec<&OwnProgram>> {
        let mut files: Vec<_> = self.files.iter().collect();
        if self.with_agent {
            files.push(self.agent.as_ref().map_err(|error| anyhow!("{error:#}"))?);
        }
        Ok(files)
    }

    /// Runs each open file, before any file is changed: a truncated program, or a program of another
    /// architecture, would make each create fail.
    ///
    /// # Errors
    /// If a program does not run.
    pub fn check_run(&self) -> Result<()> {
        for program in self.files()? {
            let opened = format!("/proc/self/fd/{}", program.file.as_raw_fd());
            check_runs(program.name, Command::new(opened))
                .with_context(|| format!("run {}, which is to be installed", program.name))?;
        }
        Ok(())
    }

    /// Checks that the installed programs run from where they are, before a runtime's file names
    /// them: a file system or a security module can refuse that.
    ///
    /// # Errors
    /// If one does not.
    pub fn check_installed(&self, folder: &Path) -> Result<()> {
        for program in self.files()? {
            let path = folder.join(program.name);
            let ran = installed(&path).and_then(|it| check_runs(program.name, it.command()));
            ran.with_context(|| format!("run {}, which was installed", path.display()))?;
        }
        Ok(())
    }

    /// The default prefix: the prefix of this program's version, or this program's folder if
    /// services search it for programs, else /usr/local/bin. In a `--root` it is /usr/local/bin.
    pub fn usual_prefix(&self, in_another_root: bool) -> PathBuf {
        if !in_another_root {
            if let Some(prefix) = prefix_of(&self.folder) {
                return prefix;
            }
            if PROGRAM_FOLDERS.map(Path::new).contains(&&*self.folder) {
                return self.folder.clone();
            }
        }
        PathBuf::from("/usr/local/bin")
    }

    /// Checks, before any file is changed, that services can run programs in this folder.
    ///
    /// # Errors
    /// If programs cannot be written there, or not be run from there.
    pub fn check_folder(&self, folder: &Path) -> Result<()> {
        const DOING: &str = "install programs in";
        const ADVICE: &str = "name another folder with --prefix DIR";
        let (shown, existing) = (folder.display(), nearest(folder));
        check_folders_of_root(folder).with_context(|| format!("{DOING} {shown}; or {ADVICE}"))?;
        let filesystem = rustix::fs::statvfs(existing);
        let why = if !fs::metadata(existing).doing(DOING, folder)?.is_dir() {
            format!("{} is not a folder", existing.display())
        } else if filesystem
            .doing(DOING, folder)?
            .f_flag
            .contains(StatVfsMountFlags::NOEXEC)
        {
            "its file system is mounted noexec".to_owned()
        } else if let Err(errno) = access(existing, Access::WRITE_OK)
            && !are_all_in(&self.files()?, folder)
        {
            format!("{} is not writable: {errno}", existing.display())
        } else {
            return Ok(());
        };
        bail!("{DOING} {shown}: {why}; {ADVICE}")
    }

    /// The folder of this version's files, and the changes after which services find these programs in
    /// `prefix`: the files, the link that selects the version, and the programs' links in the prefix.
    /// Programs that are in the prefix themselves, as a package's, stay where they are.
    pub fn in_prefix(&self, prefix: &Path) -> Result<(PathBuf, Vec<Change>)> {
        let mut changes = Vec::new();
        if self.identity.is_some() && identity(prefix) == self.identity {
            return Ok((prefix.to_owned(), changes));
        }
        let programs = self.files()?;
        let version = folder_for(prefix, &programs)?;
        let current = store(prefix).join(CURRENT);
        for program in &programs {
            let path = version.join(program.name);
            if !program.is_at(&path) {
                let bytes = Content::File(program.bytes()?);
                let mut change = Change::to(Owner::Bindguard, path, Some(bytes))?;
                change.mode = 0o755;
                changes.push(change);
            }
        }
        let name = Path::new(version.file_name().unwrap_or_default());
        changes.push(Change::link(Owner::Bindguard, current.clone(), name)?);
        for program in programs {
            let (link, target) = (prefix.join(program.name), current.join(program.name));
            changes.push(Change::link(Owner::Bindguard, link, &target)?);
        }
        Ok((version, changes))
    }
}

/// The shim and the wrapper beside this program, from any installer.
pub fn beside_this_one() -> Vec<PathBuf> {
    let own = env::current_exe().unwrap_or_default();
    match own.parent() {
        Some(folder) => [SHIM, WRAPPER].map(|name| folder.join(name)).to_vec(),
        None => Vec::new(),
    }
}

#[derive(Debug)]
struct OwnProgram {
    name: &'static str,
    file: File,
    size: u64,
}

impl OwnProgram {
    fn open(name: &'static str, path: &Path) -> Result<Self> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (found, file) = opened.with_context(|| {
            let path = path.display();
            format!("read {path}, which has to be beside this program")
        })?;
        let size = found.len();
        Ok(Self { name, file, size })
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.size).context("hold a program in memory")?];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.doing("read", Path::new(self.name))?;
        Ok(bytes)
    }

    /// True if the file at a path has this content.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|found| found.len() == self.size)
            && matches!((fs::read(path), self.bytes()), (Ok(there), Ok(own)) if there == own)
    }
}

fn are_all_in(programs: &[&OwnProgram], folder: &Path) -> bool {
    let is_there = |program: &&OwnProgram| program.is_at(&folder.join(program.name));
    programs.iter().all(is_there)
}

/// Checks that a program of bindguard starts, and is not another program.
fn check_runs(name: &str, command: Command) -> Result<()> {
    let said = self_test(name, command)?;
    ensure!(
        said.contains(name),
        "it is another program: it prints {said:?}"
    );
    Ok(())
}

/// Checks that the kernel runs an installed program, whose bytes are as installed. A program of another
/// version runs, even if its exit status is a failure: that version may not know the self-test.
///
/// # Errors
/// If the program cannot be started, is killed, or does not end.
pub fn check_starts(name: &str, path: &Path) -> Result<()> {
    match self_test(name, installed(path)?.command()) {
        Err(error) if error.is::<Failed>() => Ok(()),
        answer => answer.map(drop),
    }
}

fn self_test(name: &str, mut command: Command) -> Result<String> {
    command.arg(self_test_of(name));
    output_of(command)
}

fn installed(path: &Path) -> Result<RootProgram> {
    RootProgram::open(path)?.context("there is no such file")
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name of the link that selects a version.
pub const CURRENT: &str = "current";

/// The folder of all versions: beside a prefix `bin`, or below any other prefix.
pub fn store(prefix: &Path) -> PathBuf {
    let above = match prefix.parent() {
        Some(parent) if prefix.file_name() == Some(OsStr::new("bin")) => parent,
        _ => prefix,
    };
    above.join("lib/bindguard")
}

/// The folder for programs with these contents. A build that differs from the present one of its
/// version gets its own folder: the files of a running shim are never replaced.
fn folder_for(prefix: &Path, files: &[&OwnProgram]) -> Result<PathBuf> {
    let usual = store(prefix).join(VERSION);
    let is_other = |program: &&OwnProgram| {
        let path = usual.join(program.name);
        path.symlink_metadata().is_ok() && !program.is_at(&path)
    };
    if !files.iter().any(is_other) {
        return Ok(usual);
    }
    // the selected version first, without a hash of every program
    if let Ok(selected) = fs::read_link(store(prefix).join(CURRENT)) {
        let selected = store(prefix).join(selected);
        if are_all_in(files, &selected) {
            return Ok(selected);
        }
    }
    let mut hash = Sha256::new();
    for program in files {
        hash.update(program.bytes()?);
    }
    let digits = digits_of(&hash.finalize()[..4]);
    Ok(store(prefix).join(format!("{VERSION}-{digits}")))
}

/// The prefix of an installed version, whose programs are in `folder`.
fn prefix_of(folder: &Path) -> Option<PathBuf> {
    let above = folder.ancestors().nth(3)?;
    for prefix in [above.join("bin"), above.to_owned()] {
        let store = store(&prefix);
        let link = fs::read_link(prefix.join(CLI));
        if folder.starts_with(&store) && link.is_ok_and(|to| to.starts_with(store.join(CURRENT))) {
            return Some(prefix);
        }
    }
    None
}

/// Removes the versions that are not selected, and that no process and no running runtime's
/// configuration needs.
pub fn remove_unneeded(record: &mut Record, prefix: &Path) -> Result<()> {
    let store = store(prefix);
    let Ok(selected) = fs::read_link(store.join(CURRENT)) else {
        return Ok(());
    };
    let selected = store.join(selected);
    let mut versions: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for entry in &record.files {
        if let Some(folder) = entry.path.parent()
            && folder.parent() == Some(&store)
            && folder != selected
        {
            let files = versions.entry(folder.to_owned()).or_default();
            files.push(entry.path.clone());
        }
    }
    for files in versions.into_values() {
        let is_needed = !users_of(&files).is_empty()
            || daemon_that_names(&files).map_or(true, |daemon| daemon.is_some());
        for file in files.iter().filter(|_| !is_needed) {
            remove_file(file)?;
            record.forget(file)?;
        }
    }
    Ok(())
}

/// The config that every node of a fleet gets.
#[derive(Debug)]
pub struct NodeConfig {
    text: String,
    /// Replaces a file that was edited on the node.
    is_forced: bool,
}

impl NodeConfig {
    /// Reads and checks it, before the root is changed.
    ///
    /// # Errors
    /// If it cannot be read, or is not TOML.
    pub fn read(file: &Path, is_forced: bool) -> Result<Self> {
        let (text, file) = (change::read_text(file)?, file.display());
        let text = text.with_context(|| format!("read {file}: no such file"))?;
        Config::parse(&text).map_err(|mistake| {
            let line = mistake.line;
            anyhow!("parse {file}, line {line}: {mistake}; nothing was changed")
        })?;
        Ok(Self { text, is_forced })
    }
}

/// The planned change of the config, and the mistakes that it has.
#[derive(Debug, Default)]
pub struct SettingsPlan {
    /// The change of the config file, if its content differs.
    pub change: Option<Change>,
    /// A line for each mistake.
    pub mistakes: Vec<String>,
    /// The hash of the config that the node is to have.
    pub wanted: Option<String>,
    /// Why the node keeps a config that differs.
    pub kept: Option<String>,
}

/// Plans the change that gives the node a config, with `runtime` named in it where a runtime's
/// options need that. `None`: every runtime passes its own.
///
/// # Errors
/// If the present file is not TOML: bindguard would not use it.
pub fn plan_config(
    runtime: Option<&Path>,
    node_config: Option<&NodeConfig>,
    record: &Record,
) -> Result<SettingsPlan> {
    let path = Path::new(DEFAULT_PATH);
    // its `runtime.path` is a program that root runs
    open_of_root(path).context("read the config")?;
    let present = change::read(path)?;
    let unusual = runtime.filter(|runtime| *runtime != Path::new(USUAL_RUNTIME));
    match (node_config, present) {
        (Some(config), present) => of_the_fleet(config, present, unusual, record),
        (None, None) => written(with_runtime(SHIPPED, unusual)?),
        (None, Some(present)) => of_the_node(present, runtime),
    }
}

/// The config of the fleet. A file that was edited on this node is replaced only on request, and none
/// is replaced by a text with a mistake.
fn of_the_fleet(
    config: &NodeConfig,
    present: Option<Vec<u8>>,
    runtime: Option<&Path>,
    record: &Record,
) -> Result<SettingsPlan> {
    let (parsed, warnings) = Config::parse(&config.text)?;
    let names_another = runtime.filter(|runtime| parsed.runtime() != *runtime);
    let text = with_runtime(&config.text, names_another)
        .context("the config of the fleet names another runtime than creates containers now")?;
    let hash = record::hash(text.as_bytes());
    let mistakes: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    // After a rollback: the newer version knew every key.
    let was_valid = record.node_config.as_ref() == Some(&hash);
    if !mistakes.is_empty() && !was_valid {
        let mut plan = match (present, runtime) {
            // The defaults would repair. With a mistake the text repairs nothing.
            (None, _) => written(text)?,
            (Some(present), Some(runtime)) => of_the_node(present, Some(runtime))?,
            (Some(_), None) => SettingsPlan::default(),
        };
        plan.wanted = record.node_config.clone();
        plan.kept = Some(format!(
            "the config of the fleet has a mistake, and this node keeps its {DEFAULT_PATH}: {}; correct the config, or install a version that knows the key",
            mistakes.join("; ")
        ));
        return Ok(plan);
    }
    let mut plan = SettingsPlan::default();
    let entry = record.entry(&change::resolved(Path::new(DEFAULT_PATH)));
    match present {
        Some(present) if present == text.as_bytes() => {}
        Some(present)
            if !config.is_forced
                && present != SHIPPED.as_bytes()
                && !entry.is_some_and(|it| it.is_as_written(&Content::File(present.clone()))) =>
        {
            plan.kept = Some(format!(
                "{DEFAULT_PATH} was edited on this node and stays; to replace the file, use --force-node-config"
            ));
        }
        _ => plan = written(text)?,
    }
    plan.wanted = Some(hash);
    for mistake in mistakes {
        plan.mistakes
            .push(format!("the config of the fleet, {mistake}"));
    }
    Ok(plan)
}

fn of_the_node(present: Vec<u8>, runtime: Option<&Path>) -> Result<SettingsPlan> {
    let loaded = Loaded::from_file(Path::new(DEFAULT_PATH))
        .map_err(|error| anyhow!("{}; correct it, then run this again", error_chain(&error)))?;
    let mut plan = SettingsPlan::default();
    let named = loaded.config.runtime();
    let mut mistakes: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    if let Some(runtime) = runtime.filter(|runtime| named != *runtime) {
        let text = String::from_utf8(present).with_context(|| format!("read {DEFAULT_PATH}"))?;
        if !loaded.set.contains(&RUNTIME_KEY) {
            plan = written(with_runtime(&text, Some(runtime))?)?;
        } else if named.is_absolute() && is_gone(named) {
            // an earlier install named the runtime behind the default, and that is gone
            let (named, new) = (named.display(), runtime.display());
            mistakes.push(format!(
                "{DEFAULT_PATH} names {named}, which cannot be run: {new} takes its place"
            ));
            plan = written(with_path(&text, runtime)?)?;
        } else {
            ensure!(
                runtime == Path::new(USUAL_RUNTIME),
                "{DEFAULT_PATH} has to say [runtime] path = \"{}\", because that is what creates containers now: nothing was changed",
                runtime.display()
            );
        }
    }
    plan.mistakes = mistakes;
    Ok(plan)
}

fn written(text: String) -> Result<SettingsPlan> {
    let path = Path::new(DEFAULT_PATH);
    let change = Change::text(Owner::Bindguard, path, text)?;
    Ok(SettingsPlan {
        change: Some(change),
        ..SettingsPlan::default()
    })
}

/// The key of the OCI runtime that bindguard-runtime calls.
pub const RUNTIME_KEY: &str = "runtime.path";

/// The text with the runtime's path.
fn with_runtime(text: &str, runtime: Option<&Path>) -> Result<String> {
    let Some(runtime) = runtime else {
        return Ok(text.to_owned());
    };
    let present: Value = toml::from_str(text)?;
    ensure!(
        present["runtime"]["path"].is_null(),
        "[runtime] path has to be \"{}\"",
        runtime.display()
    );
    let text = with_path(text, runtime)?;
    let config = Config::from_toml(&text).context("parse the config to write")?;
    ensure!(
        config.runtime() == runtime,
        "the config has no place for the runtime's path"
    );
    Ok(text)
}

fn with_path(text: &str, runtime: &Path) -> Result<String> {
    let literal = toml::Value::from(runtime.display().to_string()).to_string();
    with_value(text, &["runtime", "path"], &literal)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use serde_json::json;

    use super::*;

    fn folder(prefix: &Path, program: &OwnProgram) -> PathBuf {
        folder_for(prefix, &[program]).unwrap()
    }

    #[test]
    fn versions_are_beside_bin_or_below_another_prefix() {
        assert_eq!(
            store(Path::new("/usr/local/bin")),
            Path::new("/usr/local/lib/bindguard")
        );
        assert_eq!(
            store(Path::new("/opt/guard")),
            Path::new("/opt/guard/lib/bindguard")
        );
    }

    #[test]
    fn another_build_of_a_version_gets_its_own_folder() {
        let prefix = tempfile::tempdir().unwrap();
        let build = tempfile::tempdir().unwrap();
        let program = |text: &str| {
            let path = build.path().join(text);
            fs::write(&path, text).unwrap();
            OwnProgram::open("bindguard", &path).unwrap()
        };
        let first = folder(prefix.path(), &program("one"));
        assert_eq!(first.file_name().unwrap(), VERSION);
        fs::create_dir_all(&first).unwrap();
        fs::write(first.join("bindguard"), "one").unwrap();
        assert_eq!(folder(prefix.path(), &program("one")), first);
        let second = folder(prefix.path(), &program("two"));
        assert_ne!(second, first);
        assert!(
            second
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with(&format!("{VERSION}-"))
        );
    }

    #[test]
    fn a_file_with_the_runtime_takes_another_key() {
        for text in [
            SHIPPED,
            "",
            "[checks]\nhost-root = \"off\"\n",
            "[runtime]\n# mine\n",
            "[runtime]",
            "[ runtime ] # mine\n",
            "# a",
        ] {
            let with = with_runtime(text, Some(Path::new("/usr/bin/crun"))).unwrap();
            let set = if text == SHIPPED {
                with.replace("\n# enabled = true\n", "\nenabled = false\n")
            } else {
                format!("{with}\n[journal]\nenabled = false\n")
            };
            let config = Config::from_toml(&set).unwrap();
            assert!(
                config.runtime() == Path::new("/usr/bin/crun") && config.journal().is_none(),
                "{set}"
            );
            assert!(
                text.lines()
                    .all(|line| with.lines().any(|kept| kept == line)),
                "{with}"
            );
        }
    }

    /// The defaults would repair, and an older file may.
    #[test]
    fn a_mistake_in_the_config_of_the_fleet_keeps_the_nodes_config() {
        let mistaken = "[checks]\nstale-subpath = \"report\"\n";
        let config = NodeConfig {
            text: mistaken.to_owned(),
            is_forced: true,
        };
        let plan = |present: Option<&str>, record: Value| {
            let record = serde_json::from_value(record).unwrap();
            of_the_fleet(&config, present.map(Into::into), None, &record).unwrap()
        };
        let installed =
            json!({ "version": 1, "files": [], "node_config": "hash of the old config" });
        let kept = plan(Some(SHIPPED), installed.clone());
        assert!(kept.change.is_none() && kept.wanted.as_deref() == Some("hash of the old config"));
        let sentence = kept.kept.unwrap();
        assert!(
            sentence.contains("line 2: unknown key `checks.stale-subpath`"),
            "{sentence}"
        );

        let first = plan(None, json!({ "version": 1, "files": [] }));
        let written = first.change.unwrap().after;
        assert_eq!(written, Some(Content::File(mistaken.into())));
        assert!(first.kept.is_some() && first.wanted.is_none());
        assert!(plan(Some(mistaken), installed).kept.is_some());

        // a newer version knew the key, and was rolled back
        let hash = record::hash(mistaken.as_bytes());
        let back = plan(
            Some(mistaken),
            json!({ "version": 1, "files": [], "node_config": hash }),
        );
        assert!(back.kept.is_none() && back.change.is_none() && !back.mistakes.is_empty());
    }

    #[test]
    fn a_runtime_that_the_text_names_stays() {
        let crun = Some(Path::new("/usr/bin/crun"));
        assert!(with_runtime("[runtime]\npath = \"runc\"\n", crun).is_err());
        let inline = with_runtime("runtime = {}\n", crun).unwrap();
        assert_eq!(inline, "runtime = { path = \"/usr/bin/crun\" }\n");
    }
}
