//! The record of the original files, kept on the node so that uninstall restores the exact bytes.
//!
//! `/var/lib/bindguard/install.json` lists every file that an install changed; `originals/` beside
//! it has their former content, named by SHA-256. The record is written before a file is changed:
//! uninstall can also undo an install that was killed half-way.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{fs, mem};

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_config::KEPT_PATH;
use bindguard_operator::root_program::open_of_root;
use bindguard_sys::unless_absent;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::change::{self, Attributes, Change, Content, Doing, Owner, digits_of, sweep};
use crate::running::{self, Daemon};

/// The folder of a node's record.
pub const FOLDER: &str = "/var/lib/bindguard";
const FILE: &str = "/var/lib/bindguard/install.json";
const ORIGINALS: &str = "/var/lib/bindguard/originals";

/// The first line of a file that is bindguard's own.
pub const HEADING: &str = "# Written by `bindguard install`; `bindguard uninstall` removes it.\n";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    pub owner: Owner,
    pub path: PathBuf,
    /// SHA-256 of the former bytes; none if there was no file.
    pub original: Option<String>,
    /// The former target, if there was a link.
    pub original_link: Option<PathBuf>,
    /// The attributes of the former file.
    pub attributes: Option<Attributes>,
    /// SHA-256 of the content that was written.
    pub written: String,
    /// SHA-256 of the content that an earlier install wrote: a kill may leave this content.
    pub written_before: Option<String>,
    /// The command that activates a change of this file.
    pub command: Option<String>,
}

/// All changes that installs made to this node and no uninstall has undone. An older version, after
/// a rollback, ignores keys that it does not know.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The files, in the order in which they were changed.
    pub files: Vec<Entry>,
    /// Folders that installs made; parents come first.
    #[serde(default)]
    folders: Vec<PathBuf>,
    /// Restarts that were not done yet.
    #[serde(default)]
    owed: Vec<OwedRestart>,
    /// The last installation of each runtime.
    #[serde(default)]
    pub installed: Vec<Installed>,
    /// An uninstall that is not complete. The agent reads no `null` here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removal: Option<PendingRemoval>,
    /// SHA-256 of the config that the last install was to put on this node.
    pub node_config: Option<String>,
    /// Docker's data root, as the running dockerd named it last.
    pub docker_root: Option<PathBuf>,
    /// The parts that no install could have written: their list, the part, and why. They stay in the
    /// file, and are not used.
    #[serde(skip)]
    refused: Vec<(&'static str, Value, String)>,
}

/// An uninstall that is not complete. The node agent reads the counts, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingRemoval {
    /// The runtimes to remove bindguard from; empty for all of them and the programs.
    #[serde(default)]
    pub runtimes: Vec<Owner>,
    /// The pods that need the kept files.
    #[serde(flatten)]
    pub kept: Removal,
    /// Files of other tools that name bindguard's programs.
    #[serde(default)]
    pub named_in: Vec<PathBuf>,
}

/// The number of pods for which an uninstall keeps files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Pods that select the handler.
    pub handler_kept_for_pods: usize,
    /// Pods that run under the programs.
    pub programs_kept_for_pods: usize,
}

/// The OCI runtime that bindguard-runtime calls if its config names none.
pub const USUAL_RUNTIME: &str = "runc";

/// The options of the command line, with their defaults filled in.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InstallOptions {
    /// The folder in which services find the programs.
    pub prefix: PathBuf,
    /// Guard every container, not only containers that request the handler.
    pub default: bool,
    /// Keep containerd's own shim.
    pub wrapper: bool,
    /// The containerd program.
    pub containerd: Option<PathBuf>,
    /// containerd's main file, if the operator names it.
    pub containerd_config: Option<PathBuf>,
}

/// A finished installation: the options of `install`, and the programs that containers need.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Installed {
    pub owner: Owner,
    pub options: InstallOptions,
    /// The OCI runtime that bindguard-runtime must call.
    pub needs_runtime: Option<PathBuf>,
    /// Other programs without which no container would start.
    #[serde(default)]
    pub needs_programs: Vec<PathBuf>,
}

impl Installed {
    /// Its options without `--default`.
    pub fn without_default(&self) -> InstallOptions {
        InstallOptions {
            default: false,
            ..self.options.clone()
        }
    }
}

/// A daemon that still uses what was in its file before a change, or the agent, which was not
/// started yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OwedRestart {
    pub owner: Owner,
    /// The command that activates the change.
    pub command: String,
    /// The process that ran when the file was changed.
    daemon: Option<Daemon>,
}

const VERSION: u32 = 1;
/// The begin of [`Entry::written`] for a link, instead of a hash.
const LINK: &str = "link to ";

/// True if an install can write this file of this owner.
pub type MayWrite = fn(Owner, &Path) -> bool;

impl Record {
    /// The node's record; empty if nothing is installed.
    ///
    /// # Errors
    /// If the record cannot be read, or another user than root could have written it.
    pub fn load(may_write: MayWrite) -> Result<Self> {
        let path = Path::new(FILE);
        open_of_root(path).context("read the record of the installation")?;
        let Some(bytes) = change::read(path)? else {
            return Ok(Self {
                version: VERSION,
                ..Self::default()
            });
        };
        let record = Self::from_json(&bytes, may_write).map_err(|error| {
            anyhow!(
                "parse {FILE}: {error:#}; move the file away, then run `bindguard install` with the same options, or `bindguard uninstall --by-content`"
            )
        })?;
        ensure!(
            record.version == VERSION,
            "{FILE} is of version {}, this program knows {VERSION}",
            record.version
        );
        Ok(record)
    }

    /// Without the parts that no install could have written: one bad part must not keep the others.
    fn from_json(bytes: &[u8], may_write: MayWrite) -> Result<Self> {
        let mut json: Value = serde_json::from_slice(bytes)?;
        let mut refused = Vec::new();
        for list in ["files", "owed", "installed"] {
            let Some(parts) = json.get_mut(list).and_then(Value::as_array_mut) else {
                continue;
            };
            for part in mem::take(parts) {
                match check_part(list, &part, may_write) {
                    Ok(()) => parts.push(part),
                    Err(error) => refused.push((list, part, format!("{error:#}"))),
                }
            }
        }
        let record: Self = serde_json::from_value(json)?;
        Ok(Self { refused, ..record })
    }

    /// A line for each part of the record that is not used.
    pub fn refused(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (list, _, why) in &self.refused {
            lines.push(format!(
                "ignoring an entry of {FILE}: {why}; undo the change by hand, then delete the entry from {list:?} there"
            ));
        }
        lines
    }

    /// The restarts that were not done yet.
    pub fn owed(&self) -> Vec<OwedRestart> {
        let mut left = self.owed.clone();
        left.retain(|owed| match &owed.daemon {
            Some(daemon) => daemon.still_runs() && !running::is_reloaded(owed.owner, &owed.command),
            None => self.has_files_of(owed.owner) && running::daemon_of(owed.owner).is_none(),
        });
        left
    }

    /// Records, before a file is changed, that the daemon that runs now has to be restarted.
    /// Without a daemon, the next one reads the changed file. Nothing but this command starts the
    /// agent before the next boot.
    pub fn owe(&mut self, owner: Owner, command: Option<&str>) -> Result<()> {
        let Some(command) = command else {
            return Ok(());
        };
        let daemon = running::daemon_of(owner);
        // a stop of the agent replaces its restart
        self.owed.retain(|owed| {
            let is_other = owed.daemon == daemon && owed.command != command;
            owed.owner != owner || owner != Owner::Agent && is_other
        });
        let starts_agent = command == running::AGENT_RESTART && running::sees_processes();
        if daemon.is_some() || starts_agent {
            self.owed.push(OwedRestart {
                owner,
                command: command.to_owned(),
                daemon,
            });
        }
        self.save()
    }

    /// Forgets a restart that was done.
    pub fn restarted(&mut self, command: &str) -> Result<()> {
        self.owed.retain(|owed| owed.command != command);
        self.save_or_remove()
    }

    /// The last installation of a runtime.
    pub fn verified(&self, owner: Owner) -> Option<&Installed> {
        self.installed.iter().find(|it| it.owner == owner)
    }

    /// Replaces the last installation of a runtime.
    pub fn verify(&mut self, installed: Installed) {
        self.installed.retain(|old| old.owner != installed.owner);
        self.installed.push(installed);
    }

    /// True if an install changed a file of this owner.
    pub fn has_files_of(&self, owner: Owner) -> bool {
        self.files.iter().any(|entry| entry.owner == owner)
    }

    /// The entry of a file.
    pub fn entry(&self, path: &Path) -> Option<&Entry> {
        self.files.iter().find(|entry| entry.path == path)
    }

    /// The content of a path from before the first install.
    pub fn original(&self, path: &Path) -> Result<Option<Content>> {
        self.entry(path).map_or(Ok(None), Entry::original)
    }

    /// The content that a removal leaves at a path: that from before the first install or, of a file
    /// that was edited since then, the present text without bindguard's own lines, which `cleaned`
    /// makes of that text and the former one. Without `cleaned` an edited file stays: it may be a
    /// program. `None` for a file that install made.
    ///
    /// # Errors
    /// If a text cannot be read or edited.
    pub fn content_without(
        &self,
        path: &Path,
        present: &Content,
        cleaned: Option<impl FnOnce(&str, Option<&str>) -> Result<String>>,
    ) -> Result<Option<Content>> {
        let entry = self.entry(path);
        let original = self.original(path)?;
        let is_own = entry.is_some_and(|entry| entry.is_as_written(present));
        match present {
            _ if is_own || entry.is_some() && original.as_ref() == Some(present) => {
                return Ok(original);
            }
            Content::File(bytes) if entry.is_none() && bytes.starts_with(HEADING.as_bytes()) => {
                return Ok(None);
            }
            Content::File(_) => {}
            Content::Link(_) => return Ok(Some(present.clone())),
        }
        let Some(cleaned) = cleaned else {
            return Ok(Some(present.clone()));
        };
        // of an original that does not exist, the empty text
        let before = match entry {
            Some(_) => Some(text_of(original.as_ref())?),
            None => None,
        };
        let text = cleaned(text_of(Some(present))?, before)?;
        Ok(Some(Content::File(text.into_bytes())))
    }

    /// Records a planned change. `original` is the content that an uninstall restores.
    pub fn note(&mut self, change: &Change, original: Option<&Content>) -> Result<()> {
        let Some(after) = &change.after else {
            return Ok(());
        };
        let mut entry = Entry {
            owner: change.owner,
            path: change.path.clone(),
            original: None,
            original_link: None,
            attributes: None,
            written: hash_of(after),
            written_before: None,
            command: change.command.clone(),
        };
        match original {
            Some(Content::File(bytes)) => {
                let name = hash(bytes);
                let place = Path::new(ORIGINALS).join(&name);
                if change::read(&place)?.is_none() {
                    change::write(&place, bytes, 0o600, None)?;
                }
                entry.original = Some(name);
            }
            Some(Content::Link(to)) => entry.original_link = Some(to.clone()),
            None => {}
        }
        let former = self.entry(&change.path);
        if let (Some(former), Some(before)) = (former, &change.before)
            && former.is_as_written(before)
        {
            entry.written_before = Some(hash_of(before));
        }
        let has_same_original = |former: &&Entry| {
            former.original == entry.original && former.original_link == entry.original_link
        };
        entry.attributes = if let Some(former) = former.filter(has_same_original) {
            former.attributes.clone()
        } else {
            let present = Attributes::of(&change.path);
            let present = present.doing("read the attributes of", &change.path)?;
            match original == change.before.as_ref() {
                true => present,
                false => present.map(Attributes::without_signatures),
            }
        };
        match self.files.iter_mut().find(|old| old.path == entry.path) {
            Some(old) => *old = entry,
            None => self.files.push(entry),
        }
        self.folders.extend(missing_above(&change.path));
        self.save()
    }

    /// Forgets a file that was restored. Without files and owed restarts, the folder is removed as
    /// well.
    pub fn forget(&mut self, path: &Path) -> Result<()> {
        self.files.retain(|entry| entry.path != path);
        let files = &self.files;
        self.installed
            .retain(|installed| files.iter().any(|entry| entry.owner == installed.owner));
        if !self.has_files_of(Owner::Docker) {
            self.docker_root = None;
        }
        self.remove_empty_folders();
        self.save_or_remove()
    }

    /// Records the data root of a running dockerd: nothing else names the data root once dockerd has
    /// ended.
    pub fn remember_docker_root(&mut self) -> Result<()> {
        if self.has_files_of(Owner::Docker)
            && let Some(root) = running::docker_root()
        {
            self.docker_root = Some(root);
            self.save()?;
        }
        Ok(())
    }

    fn save_or_remove(&mut self) -> Result<()> {
        self.owed = self.owed();
        self.save()?;
        self.remove_if_empty()
    }

    /// True if nothing of an installation is left.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
            && self.owed().is_empty()
            && self.removal.is_none()
            && self.refused.is_empty()
    }

    /// Removes an empty record, also if an earlier process began the removal.
    pub fn remove_if_empty(&self) -> Result<()> {
        if !self.is_empty() {
            return Ok(());
        }
        sweep(Path::new(FOLDER));
        unless_absent(fs::remove_dir_all(ORIGINALS)).doing("remove", Path::new(ORIGINALS))?;
        for file in [KEPT_PATH, FILE] {
            remove_file(Path::new(file))?;
        }
        // the folder may contain files that this record does not list
        let _ = fs::remove_dir(FOLDER);
        Ok(())
    }

    /// Removes the folders that an install made and that are empty now. A folder with any file is
    /// in use, and stays.
    fn remove_empty_folders(&mut self) {
        self.folders.reverse();
        self.folders
            .retain(|folder| unless_absent(fs::remove_dir(folder)).is_err());
        self.folders.reverse();
    }

    /// Writes the record, if it differs from the written one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        if !self.refused.is_empty() {
            let mut json = serde_json::to_value(self)?;
            for (list, part, _) in &self.refused {
                if let Value::Array(parts) = &mut json[*list] {
                    parts.push(part.clone());
                }
            }
            text = serde_json::to_string_pretty(&json)?;
        }
        text.push('\n');
        let path = Path::new(FILE);
        if change::read(path)?.as_deref() == Some(text.as_bytes()) {
            return Ok(());
        }
        change::write(path, text.as_bytes(), 0o600, None)
    }
}

impl Entry {
    /// The content that an uninstall restores.
    pub fn original(&self) -> Result<Option<Content>> {
        if let Some(target) = &self.original_link {
            return Ok(Some(Content::Link(target.clone())));
        }
        let Some(name) = &self.original else {
            return Ok(None);
        };
        let (place, path) = (Path::new(ORIGINALS).join(name), self.path.display());
        let bytes = change::read(&place)?
            .with_context(|| format!("read {}, which {path} was: no such file", place.display()))?;
        ensure!(
            hash(&bytes) == *name,
            "{} is not what was kept there: {path} stays as it is",
            place.display()
        );
        Ok(Some(Content::File(bytes)))
    }

    /// True if install made a link.
    pub fn is_link(&self) -> bool {
        self.written.starts_with(LINK)
    }

    /// True if a path still has the content that install wrote.
    pub fn is_as_written(&self, content: &Content) -> bool {
        let hash = hash_of(content);
        hash == self.written || Some(hash) == self.written_before
    }
}

/// Checks that an install could have written a part of the record.
fn check_part(list: &str, part: &Value, may_write: MayWrite) -> Result<()> {
    let command = match list {
        "files" => {
            let entry = Entry::deserialize(part)?;
            ensure!(
                may_write(entry.owner, &entry.path),
                "`install` writes no file {} for {}",
                entry.path.display(),
                entry.owner
            );
            entry.command
        }
        "owed" => Some(OwedRestart::deserialize(part)?.command),
        _ => return Ok(Installed::deserialize(part).map(drop)?),
    };
    let Some(command) = command else {
        return Ok(());
    };
    let is_known = match command.split(' ').collect::<Vec<_>>()[..] {
        ["systemctl", "restart" | "reload" | "stop", unit] => !unit.starts_with('-'),
        _ => false,
    };
    ensure!(is_known, "`install` needs no command {command:?}");
    Ok(())
}

/// The missing folders above a file, the uppermost first.
fn missing_above(path: &Path) -> Vec<PathBuf> {
    let mut missing = Vec::new();
    for folder in path.ancestors().skip(1) {
        match folder.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => missing.push(folder.to_owned()),
            _ => break,
        }
    }
    missing.reverse();
    missing
}

/// The text of a file's content; empty without a file.
///
/// # Errors
/// If it is not text.
pub fn text_of(content: Option<&Content>) -> Result<&str> {
    let bytes = content.and_then(Content::bytes).unwrap_or_default();
    std::str::from_utf8(bytes).map_err(|_| anyhow!("it is not text"))
}

/// Removes a file that may be missing.
pub fn remove_file(path: &Path) -> Result<()> {
    unless_absent(fs::remove_file(path)).doing("remove", path)?;
    Ok(())
}

fn hash_of(content: &Content) -> String {
    match content {
        Content::File(bytes) => hash(bytes),
        Content::Link(target) => format!("{LINK}{}", target.display()),
    }
}

/// SHA-256, as text.
pub fn hash(bytes: &[u8]) -> String {
    digits_of(&Sha256::digest(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_that_an_install_made_and_that_are_empty_go() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("etc/bindguard/config.toml");
        let made = missing_above(&file);
        assert_eq!(
            made,
            [place.path().join("etc"), place.path().join("etc/bindguard")]
        );
        fs::create_dir_all(place.path().join("etc/bindguard")).unwrap();
        assert_eq!(missing_above(&file), Vec::<PathBuf>::new());
        let mut record = Record {
            folders: made.clone(),
            ..Record::default()
        };
        fs::write(place.path().join("etc/another"), "").unwrap();
        record.remove_empty_folders();
        assert_eq!(record.folders, made[..1]);
        fs::remove_file(place.path().join("etc/another")).unwrap();
        record.remove_empty_folders();
        assert!(record.folders.is_empty() && place.path().read_dir().unwrap().next().is_none());
    }
}
