//! The options of a container's runtime, which come with `Create`.
//!
//! Options have three types, distinguished only by the type URL. For the runtime type
//! `io.containerd.runc.v2` the options are `containerd.runc.v1.Options`. For any other runtime type
//! containerd packs the TOML table of its config into `runtimeoptions.v1.Options`. Clients of 1.x
//! send the options for a user namespace as `containerd.linux.runc.CreateOptions`, the options of
//! the very first shim. Bytes of a wrong type also parse, with wrong values, so an unknown type is
//! refused.
//!
//! They are kept in the bundle as `options.json`, in the format of Go's shim, so that `delete`
//! works on a bundle of either shim.

use std::fs;
use std::io;

use containerd_shim_protos::shim::oci;
use protobuf::rt::skip_field_for_tag;
use protobuf::well_known_types::any::Any;
use protobuf::{CodedInputStream, Message};
use serde::{Deserialize, Serialize};

use crate::blocking::run_blocking;

const RUNC: &str = "containerd.runc.v1.Options";
/// The type for a runtime type that containerd does not know.
const GENERIC: &str = "runtimeoptions.v1.Options";
const FIRST_SHIMS: &str = "containerd.linux.runc.CreateOptions";

/// A failure to read options.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// A type URL that this shim does not know.
    #[error("options of unknown type {0:?}")]
    UnknownType(String),
    /// The bytes do not match the type URL.
    #[error("decode options of type {kind}")]
    Malformed {
        /// The type to which the bytes should belong.
        kind: &'static str,
        source: protobuf::Error,
    },
    /// The TOML table is invalid.
    #[error("read the options table{}", path.as_deref().map(|p| format!(" of {p}")).unwrap_or_default())]
    Table {
        /// The file of the table, if it came from a file.
        path: Option<String>,
        /// The error of the TOML reader.
        source: Box<toml::de::Error>,
    },
    /// The file that the options name could not be read.
    #[error("read the options file {path}")]
    File {
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// No thread could read them.
    #[error("read the options in a thread")]
    Thread(#[source] io::Error),
}

/// The options of any of the types. Field names in JSON are Go's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// chroot instead of pivot_root.
    #[serde(alias = "NoPivotRoot", skip_serializing_if = "is_default")]
    pub no_pivot_root: bool,
    /// Keep the session keyring.
    #[serde(alias = "NoNewKeyring", skip_serializing_if = "is_default")]
    pub no_new_keyring: bool,
    /// The cgroup for the shim itself.
    #[serde(alias = "ShimCgroup", skip_serializing_if = "is_default")]
    pub shim_cgroup: String,
    /// Owner of the container's pipes.
    #[serde(alias = "IoUid", skip_serializing_if = "is_default")]
    pub io_uid: u32,
    /// Group of the container's pipes.
    #[serde(alias = "IoGid", skip_serializing_if = "is_default")]
    pub io_gid: u32,
    /// The OCI runtime, a name on PATH or an absolute path; empty means runc.
    #[serde(alias = "BinaryName", skip_serializing_if = "is_default")]
    pub binary_name: String,
    /// The OCI runtime's state directory, without the namespace; empty means the default.
    #[serde(alias = "Root", skip_serializing_if = "is_default")]
    pub root: String,
    /// Let systemd make the cgroups; None if unset.
    #[serde(alias = "SystemdCgroup", skip_serializing_if = "Option::is_none")]
    pub systemd_cgroup: Option<bool>,
    /// The criu binary; containerd 2.0 dropped the option, older versions still send it.
    #[serde(alias = "CriuPath", skip_serializing_if = "is_default")]
    pub criu_path: String,
    /// The images of a container to restore. Only clients of containerd 1.x send them in options,
    /// in those of the first shim. A handler's options have a key `CriuImagePath`, too. Go's shim
    /// ignores that key.
    #[serde(skip)]
    pub images_to_restore: String,
    /// criu's working directory.
    #[serde(alias = "CriuWorkPath", skip_serializing_if = "is_default")]
    pub criu_work_path: String,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Options {
    /// Like `from_any`, for the shim's server: reads a file away from the event loop, since its
    /// file server may hang.
    pub async fn of_request(any: Option<&Any>) -> Result<Self, OptionsError> {
        match any.filter(|any| any.type_url.ends_with(GENERIC)).cloned() {
            None => Self::from_any(any),
            Some(any) => run_blocking(move || Self::from_any(Some(&any)))
                .await
                .map_err(OptionsError::Thread)?,
        }
    }

    /// Decodes by the type URL. A missing or empty message means defaults.
    pub fn from_any(any: Option<&Any>) -> Result<Self, OptionsError> {
        let Some(any) = any else {
            return Ok(Self::default());
        };
        let malformed = |kind| move |source| OptionsError::Malformed { kind, source };
        match any.type_url.rsplit('/').next().unwrap_or_default() {
            "" if any.value.is_empty() => Ok(Self::default()),
            RUNC => Self::from_runc(&any.value).map_err(malformed(RUNC)),
            FIRST_SHIMS => first_shims_options(&any.value).map_err(malformed(FIRST_SHIMS)),
            GENERIC => {
                let (path, table) = table_of(&any.value).map_err(malformed(GENERIC))?;
                if !table.is_empty() {
                    return Self::from_table(&String::from_utf8_lossy(&table), None);
                }
                if path.is_empty() {
                    return Ok(Self::default());
                }
                match fs::read_to_string(&path) {
                    Ok(text) => Self::from_table(&text, Some(path)),
                    Err(source) => Err(OptionsError::File { path, source }),
                }
            }
            _ => Err(OptionsError::UnknownType(any.type_url.clone())),
        }
    }

    fn from_runc(bytes: &[u8]) -> protobuf::Result<Self> {
        let sent = oci::Options::parse_from_bytes(bytes)?;
        Ok(Self {
            no_pivot_root: sent.no_pivot_root,
            no_new_keyring: sent.no_new_keyring,
            shim_cgroup: sent.shim_cgroup,
            io_uid: sent.io_uid,
            io_gid: sent.io_gid,
            binary_name: sent.binary_name,
            root: sent.root,
            systemd_cgroup: Some(sent.systemd_cgroup),
            criu_work_path: sent.criu_work_path,
            ..Self::default()
        })
    }

    fn from_table(text: &str, path: Option<String>) -> Result<Self, OptionsError> {
        toml::from_str(text).map_err(|source| OptionsError::Table {
            path,
            source: Box::new(source),
        })
    }
}

// Messages for which the protos crate has no type, read field by field. Unused fields are skipped.

const fn text(field: u32) -> u32 {
    (field << 3) | 2
}

const fn number(field: u32) -> u32 {
    field << 3
}

/// The file with the table, and the table itself, of a `runtimeoptions.v1.Options`.
fn table_of(bytes: &[u8]) -> protobuf::Result<(String, Vec<u8>)> {
    const CONFIG_PATH: u32 = text(2);
    const CONFIG_BODY: u32 = text(3);
    let (mut path, mut body) = (String::new(), Vec::new());
    let mut input = CodedInputStream::from_bytes(bytes);
    while let Some(tag) = input.read_raw_tag_or_eof()? {
        match tag {
            CONFIG_PATH => path = input.read_string()?,
            CONFIG_BODY => body = input.read_bytes()?,
            other => skip_field_for_tag(other, &mut input)?,
        }
    }
    Ok((path, body))
}

/// `containerd.linux.runc.CreateOptions`, see `runtime/linux/runctypes/runc.proto` of containerd
/// 1.7.
fn first_shims_options(bytes: &[u8]) -> protobuf::Result<Options> {
    const NO_PIVOT_ROOT: u32 = number(1);
    const NO_NEW_KEYRING: u32 = number(8);
    const SHIM_CGROUP: u32 = text(9);
    const IO_UID: u32 = number(10);
    const IO_GID: u32 = number(11);
    const CRIU_WORK_PATH: u32 = text(12);
    const CRIU_IMAGE_PATH: u32 = text(13);
    let mut options = Options::default();
    let mut input = CodedInputStream::from_bytes(bytes);
    while let Some(tag) = input.read_raw_tag_or_eof()? {
        match tag {
            NO_PIVOT_ROOT => options.no_pivot_root = input.read_bool()?,
            NO_NEW_KEYRING => options.no_new_keyring = input.read_bool()?,
            SHIM_CGROUP => options.shim_cgroup = input.read_string()?,
            IO_UID => options.io_uid = input.read_uint32()?,
            IO_GID => options.io_gid = input.read_uint32()?,
            CRIU_WORK_PATH => options.criu_work_path = input.read_string()?,
            CRIU_IMAGE_PATH => options.images_to_restore = input.read_string()?,
            other => skip_field_for_tag(other, &mut input)?,
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(type_url: &str, value: Vec<u8>) -> Any {
        Any {
            type_url: type_url.into(),
            value,
            ..Default::default()
        }
    }

    fn generic(path: &str, body: &str) -> Vec<u8> {
        let mut out = vec![0x0a, 1, b'T'];
        for (tag, text) in [(0x12, path), (0x1a, body)] {
            out.push(tag);
            out.push(u8::try_from(text.len()).unwrap());
            out.extend_from_slice(text.as_bytes());
        }
        out
    }

    #[test]
    fn nothing_means_defaults() {
        assert_eq!(Options::from_any(None).unwrap(), Options::default());
        assert_eq!(
            Options::from_any(Some(&any("", vec![]))).unwrap(),
            Options::default()
        );
    }

    #[test]
    fn runc_options_with_and_without_a_url_prefix() {
        let sent = oci::Options {
            binary_name: "crun".into(),
            systemd_cgroup: true,
            ..Default::default()
        };
        let bytes = sent.write_to_bytes().unwrap();
        for url in [
            "containerd.runc.v1.Options",
            "types.containerd.io/containerd.runc.v1.Options",
        ] {
            let options = Options::from_any(Some(&any(url, bytes.clone()))).unwrap();
            assert_eq!(options.binary_name, "crun");
            assert_eq!(options.systemd_cgroup, Some(true));
        }
    }

    #[test]
    fn a_table_in_the_body_or_in_a_file() {
        let table =
            "BinaryName = '/usr/bin/crun'\nRoot='/run/x'\nSystemdCgroup = true\nFancy = 3\n";
        let options =
            Options::from_any(Some(&any("runtimeoptions.v1.Options", generic("", table)))).unwrap();
        assert_eq!(
            (options.binary_name.as_str(), options.root.as_str()),
            ("/usr/bin/crun", "/run/x")
        );

        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), table).unwrap();
        let sent = generic(file.path().to_str().unwrap(), "");
        assert_eq!(
            Options::from_any(Some(&any("runtimeoptions.v1.Options", sent))).unwrap(),
            options
        );
    }

    /// Containerd's default configuration shows the key.
    #[test]
    fn the_image_path_of_a_handler_is_no_request_to_restore() {
        let sent = oci::Options {
            criu_image_path: "/images".into(),
            ..Default::default()
        };
        let of_runc = any("containerd.runc.v1.Options", sent.write_to_bytes().unwrap());
        let of_table = any(
            "runtimeoptions.v1.Options",
            generic("", "CriuImagePath = '/images'\n"),
        );
        for handler in [of_runc, of_table] {
            assert_eq!(
                Options::from_any(Some(&handler)).unwrap().images_to_restore,
                ""
            );
        }
    }

    #[test]
    fn a_foreign_type_is_refused_and_not_guessed() {
        let refused = Options::from_any(Some(&any("io.example.Options", vec![1])));
        assert!(matches!(refused, Err(OptionsError::UnknownType(_))));
        let garbage = Options::from_any(Some(&any("containerd.runc.v1.Options", vec![0xff])));
        assert!(matches!(garbage, Err(OptionsError::Malformed { .. })));
        let table = Options::from_any(Some(&any(
            "runtimeoptions.v1.Options",
            generic("", "IoUid = 'x'"),
        )));
        assert!(matches!(table, Err(OptionsError::Table { path: None, .. })));
    }

    #[test]
    fn the_json_matches_the_one_of_gos_shim() {
        let options = Options {
            binary_name: "crun".into(),
            io_uid: 7,
            ..Default::default()
        };
        assert_eq!(
            serde_json::to_string(&options).unwrap(),
            r#"{"io_uid":7,"binary_name":"crun"}"#
        );
        let gos = r#"{"root":"/run/y","systemd_cgroup":true,"task_api_version":3}"#;
        assert_eq!(serde_json::from_str::<Options>(gos).unwrap().root, "/run/y");
    }

    #[test]
    fn a_user_namespaces_owner_of_the_pipes() {
        // no_pivot_root, an open_tcp that is skipped, io_uid and io_gid 100000
        let bytes = [0x08, 1, 0x10, 1, 0x50, 0xa0, 0x8d, 6, 0x58, 0xa0, 0x8d, 6];
        let options = first_shims_options(&bytes).unwrap();
        assert!(options.no_pivot_root && !options.no_new_keyring);
        assert_eq!((options.io_uid, options.io_gid), (100_000, 100_000));
    }
}
