//! The handler's table, made from the table of the runtime that it guards. There are three kinds of
//! handlers.
//!
//! | kind | `runtime_type` | supervisor | on |
//! |---|---|---|---|
//! | shim | `io.containerd.runc.v2` and `runtime_path` | bindguard's shim, with every option of the runtime | 1.7 and newer |
//! | named shim | `io.containerd.bindguard.v2` | bindguard's shim; 1.6 ignores `runtime_path` and hands no options on | 1.6 |
//! | wrapper | `io.containerd.runc.v2` and `BinaryName` | containerd's own shim | any |

use std::path::{Path, PathBuf};

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use toml::{Table, Value};

use super::files::Version;
use crate::plan::USUAL_RUNTIME;
use crate::search_path::is_searched;

const RUNC: &str = "io.containerd.runc.v2";

/// The way in which containerd calls the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerKind {
    /// bindguard's shim by its path.
    Shim,
    /// bindguard's shim by its name.
    NamedShim,
    /// bindguard-runtime under containerd's own shim.
    Wrapper,
}

/// A planned handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Handler {
    /// Its table.
    pub table: Table,
    /// The OCI runtime that bindguard-runtime must call, if a handler of this kind does not pass it
    /// on.
    pub needs_runtime: Option<PathBuf>,
    /// Options of the runtime that a handler of this kind loses.
    pub lost: Vec<String>,
}

/// True if a runtime's shim calls an OCI runtime, before which the guard can run.
pub fn is_guarded(base: &Table) -> bool {
    base.get("runtime_type").and_then(Value::as_str) == Some(RUNC)
}

/// A runtime of a kind that calls no OCI runtime.
#[derive(Debug, thiserror::Error)]
#[error("its runtime_type is {0:?}, and bindguard guards {RUNC} only")]
pub struct NotGuarded(String);

impl HandlerKind {
    /// The kind that supports most on this containerd, or the wrapper on request. A default runtime
    /// also creates containers of pods older than it. For those, 1.6 would take the options of
    /// `base` from their own shim.
    pub fn on(version: Version, wrapper: bool, default: bool, base: &Table) -> Self {
        let loses = version < (1, 7) && default && base.get("options").is_some();
        match version {
            _ if wrapper || loses => Self::Wrapper,
            (1, 0..7) => Self::NamedShim,
            _ => Self::Shim,
        }
    }

    /// Every kind by which this containerd calls the guard.
    pub fn all_on(version: Version) -> &'static [Self] {
        match version {
            (1, 0..7) => &[Self::NamedShim, Self::Wrapper],
            _ => &[Self::Shim, Self::NamedShim, Self::Wrapper],
        }
    }

    /// The handler of this kind, for a runtime with the table `base`.
    ///
    /// # Errors
    /// If the runtime is not of runc's kind.
    pub fn handler(self, base: &Table, prefix: &Path) -> Result<Handler, NotGuarded> {
        if !is_guarded(base) {
            let kind = base
                .get("runtime_type")
                .and_then(Value::as_str)
                .unwrap_or_default();
            return Err(NotGuarded(kind.to_owned()));
        }
        let mut table: Table = base
            .iter()
            .filter(|(key, _)| !key.starts_with("runtime_"))
            .map(owned)
            .collect();
        let mut options = table
            .remove("options")
            .and_then(|options| options.as_table().cloned())
            .unwrap_or_default();
        let named = options.get("BinaryName").and_then(Value::as_str);
        let runtime = PathBuf::from(named.unwrap_or(USUAL_RUNTIME));
        let mut handler = Handler {
            table: Table::new(),
            needs_runtime: None,
            lost: Vec::new(),
        };
        let mut kind = RUNC.to_owned();
        match self {
            Self::Shim => {
                table.insert("runtime_path".to_owned(), text(&prefix.join(SHIM)));
            }
            Self::NamedShim => {
                // the form of the cgroup's path shows SystemdCgroup
                handler.lost = options
                    .keys()
                    .filter(|key| !["SystemdCgroup", "BinaryName"].contains(&key.as_str()))
                    .cloned()
                    .collect();
                handler.needs_runtime = Some(runtime);
                options.clear();
                if !is_searched(prefix) {
                    kind = prefix.join(SHIM).display().to_string();
                } else {
                    SHIM_RUNTIME_TYPE.clone_into(&mut kind);
                }
            }
            Self::Wrapper => {
                // a foreign shim of the operator is kept
                if let Some(path) = base.get("runtime_path") {
                    table.insert("runtime_path".to_owned(), path.clone());
                }
                handler.needs_runtime = Some(runtime);
                options.insert("BinaryName".to_owned(), text(&prefix.join(WRAPPER)));
            }
        }
        table.insert("runtime_type".to_owned(), Value::String(kind));
        if !options.is_empty() {
            table.insert("options".to_owned(), Value::Table(options));
        }
        handler.table = table;
        Ok(handler)
    }
}

fn owned((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

fn text(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Table {
        toml::from_str(
            "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/old'\nsnapshotter = 's'\npod_annotations = ['a']\n\
             [options]\nSystemdCgroup = true\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\n",
        )
        .unwrap()
    }

    fn handler(version: Version, wrapper: bool, prefix: &str) -> Handler {
        HandlerKind::on(version, wrapper, false, &base())
            .handler(&base(), Path::new(prefix))
            .unwrap()
    }

    #[test]
    fn newer_containerds_keep_every_option() {
        let handler = handler((2, 1), false, "/opt/b");
        assert_eq!(
            handler.table,
            toml::from_str(
                "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/opt/b/containerd-shim-bindguard-v2'\n\
                 pod_annotations = ['a']\nsnapshotter = 's'\n\
                 [options]\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\nSystemdCgroup = true\n"
            )
            .unwrap()
        );
        assert_eq!((handler.needs_runtime, handler.lost.len()), (None, 0));
    }

    #[test]
    fn containerd_1_6_finds_the_shim_by_name_and_lost_options_are_reported() {
        let made = handler((1, 6), false, "/usr/local/bin");
        assert_eq!(
            made.table.get("runtime_type").unwrap().as_str(),
            Some(SHIM_RUNTIME_TYPE)
        );
        assert!(!made.table.contains_key("options") && !made.table.contains_key("runtime_path"));
        assert_eq!(
            (made.needs_runtime, made.lost),
            (Some("/usr/bin/crun".into()), vec!["Root".to_owned()])
        );
        let elsewhere = handler((1, 6), false, "/opt/b");
        assert_eq!(
            elsewhere.table.get("runtime_type").unwrap().as_str(),
            Some("/opt/b/containerd-shim-bindguard-v2")
        );
    }

    #[test]
    fn the_wrapper_stands_before_the_runtime_that_was_named() {
        let handler = handler((1, 6), true, "/usr/bin");
        assert_eq!(
            handler.table["options"]["BinaryName"].as_str(),
            Some("/usr/bin/bindguard-runtime")
        );
        assert_eq!(
            (handler.needs_runtime, handler.lost.len()),
            (Some("/usr/bin/crun".into()), 0)
        );
    }

    #[test]
    fn pods_that_are_older_than_the_default_keep_their_options() {
        let (plain, base) = (Table::new(), base());
        assert_eq!(
            HandlerKind::on((1, 6), false, true, &base),
            HandlerKind::Wrapper
        );
        assert_eq!(
            HandlerKind::on((1, 6), false, true, &plain),
            HandlerKind::NamedShim
        );
        assert_eq!(
            HandlerKind::on((1, 7), false, true, &base),
            HandlerKind::Shim
        );
    }

    #[test]
    fn another_kind_of_runtime_is_refused() {
        let kata: Table = toml::from_str("runtime_type = 'io.containerd.kata.v2'").unwrap();
        assert!(
            HandlerKind::Shim
                .handler(&kata, Path::new("/b"))
                .unwrap_err()
                .to_string()
                .contains("kata")
        );
    }
}
