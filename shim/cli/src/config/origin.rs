//! The active settings, key by key, with the origin of each value.

use std::path::Path;

use bindguard_config::{ActiveKey, CHANGING_KEYS, Instead, KEPT_PATH, Loaded};
use serde::Serialize;
use toml::Value;

/// An active setting.
#[derive(Debug, Serialize)]
pub struct ShownKey {
    /// `table.key`
    pub key: &'static str,
    /// Its value.
    pub value: Value,
    /// The file that sets the value; `default` if none does; `report-only` if a mistake keeps the key
    /// from its own value.
    pub origin: String,
}

/// Every key of the config, in the order of the shipped file. `path`: the node's file.
pub fn shown(loaded: &Loaded, path: &Path) -> Vec<ShownKey> {
    let (file, unset) = match loaded.problem.as_ref().map(|problem| problem.instead) {
        None => (path.display().to_string(), "default"),
        Some(Instead::Kept) => (KEPT_PATH.to_owned(), "default"),
        Some(Instead::ReportOnly) => (String::new(), "report-only"),
    };
    let origin = |name: &str| {
        if loaded.only_reports && CHANGING_KEYS.contains(&name) {
            "report-only".to_owned()
        } else if loaded.set.contains(&name) {
            file.clone()
        } else {
            unset.to_owned()
        }
    };
    let shown = |ActiveKey { name, value }| ShownKey {
        key: name,
        value,
        origin: origin(name),
    };
    loaded.config.active_keys().into_iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use bindguard_config::Config;

    use super::*;
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let documented = documented("`config show`");
        let config = Config::from_toml("guard.deadline-ms = 500\n").unwrap();
        let loaded = Loaded {
            config,
            problem: None,
            warnings: Vec::new(),
            text: String::new(),
            set: vec!["guard.deadline-ms"],
            only_reports: false,
        };
        let mut keys = shown(&loaded, Path::new("/etc/bindguard/config.toml"));
        // the document shows two of them
        keys.retain(|key| documented.contains(&format!("{:?}", key.key)));
        assert_eq!(
            serde_json::to_string_pretty(&keys).unwrap(),
            documented.trim_end()
        );
    }
}
