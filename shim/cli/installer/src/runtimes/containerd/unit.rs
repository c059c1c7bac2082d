//! The command of containerd's systemd service, for a node whose containerd does not run: see
//! systemd.unit(5).

use std::path::{Path, PathBuf};

use crate::change::read_text;
use crate::running::option;

/// The folders of units, with descending precedence.
const FOLDERS: [&str; 5] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];

/// True if there is a service of this name.
pub fn exists(root: &Path, service: &str) -> bool {
    FOLDERS.iter().any(|folder| {
        root.join(folder)
            .join(format!("{service}.service"))
            .symlink_metadata()
            .is_ok()
    })
}

/// The file that `--config` names in the service's command.
pub fn config_of(root: &Path, service: &str) -> Option<PathBuf> {
    let texts = texts(root, service);
    let lines = || texts.iter().flat_map(|text| text.lines()).map(str::trim);
    let command = lines()
        .filter_map(|line| line.strip_prefix("ExecStart="))
        .rfind(|command| !command.is_empty())?;
    let variables = lines()
        .filter_map(|line| line.strip_prefix("Environment="))
        .flat_map(str::split_whitespace);
    let variables = variables.filter_map(|word| word.trim_matches('"').split_once('='));
    let expanded = variables.fold(command.to_owned(), |command, (name, value)| {
        command
            .replace(&format!("${{{name}}}"), value)
            .replace(&format!("${name}"), value)
    });
    let words: Vec<String> = expanded.split_whitespace().map(str::to_owned).collect();
    option(&words, &["config", "c"]).map(PathBuf::from)
}

/// The unit, and then its drop-ins in the order of their names.
fn texts(root: &Path, service: &str) -> Vec<String> {
    let folders = FOLDERS.map(|folder| root.join(folder));
    let unit = folders
        .iter()
        .find_map(|folder| read_text(&folder.join(format!("{service}.service"))).ok()?);
    let drop_ins = folders
        .iter()
        .map(|folder| folder.join(format!("{service}.service.d")));
    let entries = drop_ins
        .filter_map(|folder| folder.read_dir().ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let mut drop_ins: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|it| it == "conf"))
        .collect();
    drop_ins.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    unit.into_iter()
        .chain(drop_ins.iter().filter_map(|path| read_text(path).ok()?))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    #[test]
    fn the_last_command_of_a_unit_and_its_drop_ins_is_active() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(config_of(root.path(), "containerd"), None);
        write(
            "lib/systemd/system/containerd.service",
            "[Service]\nExecStart=/usr/bin/containerd\n",
        );
        assert_eq!(config_of(root.path(), "containerd"), None);
        let flatcar = "[Service]\nEnvironment=CONTAINERD_CONFIG=/usr/share/containerd/config.toml\nExecStart=/usr/bin/containerd --config ${CONTAINERD_CONFIG}\n";
        write("usr/lib/systemd/system/containerd.service", flatcar);
        assert_eq!(
            config_of(root.path(), "containerd"),
            Some("/usr/share/containerd/config.toml".into())
        );
        write(
            "etc/systemd/system/containerd.service.d/10-own.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/containerd -c /etc/own.toml\n",
        );
        assert_eq!(
            config_of(root.path(), "containerd"),
            Some("/etc/own.toml".into())
        );
    }
}
