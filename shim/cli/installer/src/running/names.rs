//! Finds a program's name anywhere in a configuration.
//!
//! Each runtime has its own keys for paths, and versions add more. Any value is enough: a path to
//! the program's file, or the `runtime_type` by which containerd finds the shim.

use std::path::Path;

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE};
use serde_json::Value;

use crate::attributes::identity;
use crate::search_path;

/// True if a string in this configuration names the program.
pub fn is_in(config: &Value, program: &Path) -> bool {
    match config {
        Value::String(text) => is_named(text, program),
        Value::Array(items) => items.iter().any(|item| is_in(item, program)),
        Value::Object(members) => members.values().any(|member| is_in(member, program)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// True if a TOML or JSON file with this text names the program. A template is neither: there the
/// path counts wherever it is.
pub fn is_in_text(text: &str, program: &Path) -> bool {
    if let Ok(config) = toml::from_str(text) {
        return is_in(&config, program);
    }
    match serde_json::from_str(text) {
        Ok(config) => is_in(&config, program),
        Err(_) => text.contains(&program.display().to_string()),
    }
}

fn is_named(text: &str, program: &Path) -> bool {
    let named = Path::new(text);
    named == program
        || text == SHIM_RUNTIME_TYPE
            && is_found_by_type(program, search_path::find(SHIM).as_deref())
        || named.is_absolute()
            && named.file_name() == program.file_name()
            && is_same_file(named, program)
}

/// True if containerd may find this program by the shim's type. containerd searches its own `PATH`;
/// where that search cannot be repeated, every installed shim counts as found.
fn is_found_by_type(program: &Path, found: Option<&Path>) -> bool {
    program.file_name().is_some_and(|name| name == SHIM)
        && found.is_none_or(|found| is_same_file(found, program))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    identity(one).is_some_and(|found| identity(other) == Some(found))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_path_another_path_to_it_and_the_type_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join(SHIM), folder.path().join("link"));
        fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let in_link = link.join(SHIM);
        for text in [real.to_str().unwrap(), in_link.to_str().unwrap()] {
            let config = json!({ "runtimes": [{ "x": { "runtimePath": text } }] });
            assert!(is_in(&config, &real), "{text}");
        }
        for text in [
            "/usr/bin/runc",
            "/elsewhere/containerd-shim-bindguard-v2",
            "containerd-shim-runc-v2",
            "",
        ] {
            assert!(!is_in(&json!([text]), &real), "{text}");
        }
        let other = folder.path().join("other");
        fs::write(&other, "").unwrap();
        assert!(is_found_by_type(&real, None) && is_found_by_type(&real, Some(&in_link)));
        assert!(!is_found_by_type(&real, Some(&other)), "another version");
        assert!(!is_found_by_type(
            Path::new("/usr/local/bin/bindguard-runtime"),
            None
        ));
    }
}
