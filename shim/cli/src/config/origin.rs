//! The active settings, key by key, with the origin of each value.
//!
//! The config file that bindguard ships lists every key with its default, and a test of that file checks this. So it is also
//! the list of keys here: a key that is added there is shown here.

use std::path::Path;

use bindguard_config::SHIPPED;
use serde::Serialize;
use toml::{Table, Value};

/// One active setting.
#[derive(Debug, Serialize)]
pub struct InForce {
    /// `table.key`
    pub key: String,
    /// Its value.
    pub value: Value,
    /// The file that sets the value; `default` if none does.
    pub origin: String,
}

/// Every key, in the order of the shipped file. `file`: the config that was read, and its path.
pub fn in_force(file: Option<(&Path, &Table)>) -> Vec<InForce> {
    let mut keys = Vec::new();
    for (table, key, default) in shipped() {
        let set = file.and_then(|(path, tables)| Some((path, tables.get(&table)?.get(&key)?)));
        let (value, origin) = match set {
            Some((path, value)) => (value.clone(), path.display().to_string()),
            None => (default, "default".to_owned()),
        };
        keys.push(InForce { key: format!("{table}.{key}"), value, origin });
    }
    keys
}

/// The keys of the shipped file: table headers are uncommented, keys are behind a `#`.
fn shipped() -> Vec<(String, String, Value)> {
    let (mut keys, mut table) = (Vec::new(), String::new());
    for line in SHIPPED.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            table = name.to_owned();
        } else if let Some(Ok(one)) = line.strip_prefix("# ").map(str::parse::<Table>) {
            keys.extend(one.into_iter().map(|(key, value)| (table.clone(), key, value)));
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::documented;

    #[test]
    fn json_matches_the_document() {
        let shown = documented("`config show`");
        let file: Table = "guard.deadline-ms = 500\n".parse().unwrap();
        let mut keys = in_force(Some((Path::new("/etc/bindguard/config.toml"), &file)));
        // the document shows two of them
        keys.retain(|key| shown.contains(&format!("{:?}", key.key)));
        assert_eq!(serde_json::to_string_pretty(&keys).unwrap(), shown.trim_end());
    }

    #[test]
    fn every_key_of_the_shipped_file_is_listed_with_its_origin() {
        let file: Table = "guard.deadline-ms = 500\n[checks]\nhost-root = 'off'\n".parse().unwrap();
        let keys = in_force(Some((Path::new("/etc/x.toml"), &file)));
        let of = |name: &str| keys.iter().find(|key| key.key == name).unwrap();
        assert_eq!(
            (of("guard.deadline-ms").value.as_integer(), &*of("guard.deadline-ms").origin),
            (Some(500), "/etc/x.toml")
        );
        assert_eq!(
            (of("checks.host-root").value.as_str(), &*of("checks.host-root").origin),
            (Some("off"), "/etc/x.toml")
        );
        assert_eq!((of("runtime.path").value.as_str(), &*of("runtime.path").origin), (Some("runc"), "default"));
        let listed = SHIPPED.lines().filter(|line| line.starts_with("# ") && line.contains(" = ")).count();
        assert!(keys.len() >= 10 && keys.len() <= listed, "{} keys of {listed}", keys.len());
    }
}
