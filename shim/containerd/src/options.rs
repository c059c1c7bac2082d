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

use containerd_shim_protos::shim::oci;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownFields, UnknownValueRef};
use serde::{Deserialize, Serialize};

use crate::blocking::run_blocking;
use crate::step::{StepError, failed};

const RUNC: &str = "containerd.runc.v1.Options";
/// The type for a runtime type that containerd does not know.
const GENERIC: &str = "runtimeoptions.v1.Options";
const FIRST_SHIMS: &str = "containerd.linux.runc.CreateOptions";

/// A failure to read options.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The bytes do not match the type URL.
    #[error(transparent)]
    Malformed(StepError),
    /// An unknown type, or a table or file that cannot be read. Only `Create` refuses these.
    #[error(transparent)]
    Unusable(StepError),
}

impl From<OptionsError> for StepError {
    fn from(error: OptionsError) -> Self {
        match error {
            OptionsError::Malformed(step) | OptionsError::Unusable(step) => step,
        }
    }
}

pub fn unknown_type(type_url: &str) -> OptionsError {
    OptionsError::Unusable(format!("options of unknown type {type_url:?}").into())
}

/// For bytes that should belong to this type.
pub fn malformed(kind: &str) -> impl FnOnce(protobuf::Error) -> OptionsError {
    let step = failed(format!("decode options of type {kind}"));
    |source| OptionsError::Malformed(step(source))
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
                .map_err(failed("read the options in a thread"))
                .map_err(OptionsError::Unusable)?,
        }
    }

    /// Decodes by the type URL. A missing or empty message means defaults.
    pub fn from_any(any: Option<&Any>) -> Result<Self, OptionsError> {
        let Some(any) = any else {
            return Ok(Self::default());
        };
        match any.type_url.rsplit('/').next().unwrap_or_default() {
            "" if any.value.is_empty() => Ok(Self::default()),
            RUNC => Self::from_runc(&any.value).map_err(malformed(RUNC)),
            FIRST_SHIMS => first_shims_options(&any.value).map_err(malformed(FIRST_SHIMS)),
            GENERIC => {
                let message = Empty::parse_from_bytes(&any.value).map_err(malformed(GENERIC))?;
                let fields = message.special_fields.unknown_fields();
                let (path, table) = (text(fields, 2), text(fields, 3));
                Self::from_file_or_table(&path, table).map_err(OptionsError::Unusable)
            }
            _ => Err(unknown_type(&any.type_url)),
        }
    }

    fn from_file_or_table(path: &str, mut table: String) -> Result<Self, StepError> {
        let mut step = "read the options table".to_owned();
        if table.is_empty() {
            if path.is_empty() {
                return Ok(Self::default());
            }
            let read = fs::read_to_string(path);
            table = read.map_err(failed(format!("read the options file {path}")))?;
            step = format!("{step} of {path}");
        }
        toml::from_str(&table).map_err(failed(step))
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
}

/// `containerd.linux.runc.CreateOptions`, see `runtime/linux/runctypes/runc.proto` of containerd
/// 1.7.
fn first_shims_options(bytes: &[u8]) -> protobuf::Result<Options> {
    let message = Empty::parse_from_bytes(bytes)?;
    let fields = message.special_fields.unknown_fields();
    let number = |field| match fields.get(field) {
        Some(UnknownValueRef::Varint(number)) => number as u32,
        _ => 0,
    };
    Ok(Options {
        no_pivot_root: number(1) != 0,
        no_new_keyring: number(8) != 0,
        shim_cgroup: text(fields, 9),
        io_uid: number(10),
        io_gid: number(11),
        criu_work_path: text(fields, 12),
        images_to_restore: text(fields, 13),
        ..Options::default()
    })
}

/// A field of a message for which the protos crate has no type.
pub fn text(fields: &UnknownFields, field: u32) -> String {
    match fields.get(field) {
        Some(UnknownValueRef::LengthDelimited(text)) => String::from_utf8_lossy(text).into_owned(),
        _ => String::new(),
    }
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
        assert_eq!(
            refused.unwrap_err().to_string(),
            "options of unknown type \"io.example.Options\""
        );
        let garbage = Options::from_any(Some(&any("containerd.runc.v1.Options", vec![0xff])));
        assert!(matches!(garbage, Err(OptionsError::Malformed(_))));
        let table = Options::from_any(Some(&any(
            "runtimeoptions.v1.Options",
            generic("", "IoUid = 'x'"),
        )));
        assert_eq!(table.unwrap_err().to_string(), "read the options table");
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
