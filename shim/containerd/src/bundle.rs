//! The files of a bundle that the shim reads and writes.
//!
//! `runtime`, `options.json` and `init.pid` have the names and forms of Go's shim: after a crash,
//! `delete` may have to work on a bundle of Go's shim, or of any version of this shim. These files
//! are written before the first call of the runtime and removed when nothing of the container is
//! left. The shim reads a few fields of `config.json` and never writes it.
//!
//! The options of a container's runtime come with `Create`. They have three types, distinguished only by the type URL. For the runtime type
//! `io.containerd.runc.v2` the options are `containerd.runc.v1.Options`. For any other runtime type
//! containerd packs the TOML table of its config into `runtimeoptions.v1.Options`. Clients of 1.x
//! send the options for a user namespace as `containerd.linux.runc.CreateOptions`, the options of
//! the very first shim. Bytes of a wrong type also parse, with wrong values, so an unknown type is
//! refused.
//!
//! They are kept in the bundle as `options.json`, in the format of Go's shim, so that `delete`
//! works on a bundle of either shim.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::spec::{RawObject, Text};
use bindguard_sys::{unless_absent, write_new_file};
use containerd_shim_protos::shim::oci;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownFields, UnknownValueRef};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::work::{Result, StepError, failed, run_blocking};

const CONFIG: &str = "config.json";
/// The options of the container's runtime.
const OPTIONS: &str = "options.json";
/// The runtime's name alone; shims older than `options.json` read it.
const RUNTIME: &str = "runtime";

#[derive(Clone)]
pub struct Bundle {
    pub path: PathBuf,
}

impl Bundle {
    /// The bundle at this path. No file is read yet.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// True if nothing is at its path.
    pub fn is_gone(&self) -> bool {
        let found = self.path.symlink_metadata();
        found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// The mount point of the container's root filesystem.
    pub fn rootfs(&self) -> PathBuf {
        self.path.join("rootfs")
    }

    /// criu's default working directory: containerd makes this link to a directory on disk.
    pub fn work(&self) -> PathBuf {
        self.path.join("work")
    }

    /// The runtime writes the pid of the container's init into this file.
    pub fn init_pid_file(&self) -> PathBuf {
        self.path.join("init.pid")
    }

    /// The file of an exec: into `json` the shim writes the process, for the runtime, and into `pid`
    /// the runtime the pid. The prefix keeps it from the bundle's own files: a client may name an
    /// exec `init` or `shim`.
    pub fn exec_file(&self, exec_id: &str, extension: &str) -> PathBuf {
        self.path.join(format!("exec-{exec_id}.{extension}"))
    }

    /// Reads the fields of `config.json` that the shim needs.
    pub fn spec(&self) -> Result<ShimSpec> {
        let path = self.path.join(CONFIG);
        let bytes = fs::read(&path).map_err(failed(format!("read {}", path.display())))?;
        ShimSpec::parse(&bytes).map_err(failed(parse(&path)))
    }

    /// Saves the options of this container's runtime for `delete`.
    pub fn write_options(&self, options: &Options) -> Result<()> {
        let path = self.path.join(OPTIONS);
        let json = serde_json::to_vec(options).map_err(failed(parse(&path)))?;
        for (path, bytes) in [
            (path, &*json),
            (self.path.join(RUNTIME), options.binary_name.as_bytes()),
        ] {
            write_beside(&path, bytes).map_err(failed(format!("write {}", path.display())))?;
        }
        Ok(())
    }

    /// The options that a shim saved here; defaults if there are none.
    pub fn read_options(&self) -> Result<Options> {
        let path = self.path.join(OPTIONS);
        let mut options = Options::default();
        if let Some(json) = read_if_there(&path)?
            && !json.trim().is_empty()
        {
            options = serde_json::from_str(&json).map_err(failed(parse(&path)))?;
        }
        if let Some(runtime) = read_if_there(&self.path.join(RUNTIME))? {
            options.binary_name = runtime.trim().to_owned();
        }
        Ok(options)
    }

    /// Records that the runtime no longer knows the container, and that the root filesystem is
    /// unmounted.
    pub fn settle(&self) {
        for file in ["init.pid", OPTIONS, RUNTIME] {
            // A file that stays only makes `delete` check again.
            let _ = fs::remove_file(self.path.join(file));
        }
    }

    /// True if `delete` has nothing to do. In a bundle without options no runtime was called yet,
    /// or everything is removed.
    pub fn is_settled(&self) -> bool {
        let has = |name: &str| self.path.join(name).try_exists();
        matches!(
            (has(CONFIG), has(OPTIONS), has(RUNTIME)),
            (Ok(true), Ok(false), Ok(false))
        )
    }

    /// The pid in a pid-file.
    pub fn read_pid(path: &Path) -> Result<u32> {
        let text = fs::read_to_string(path).map_err(failed(format!("read {}", path.display())))?;
        match text.trim().parse() {
            Ok(pid) if pid > 0 => Ok(pid),
            _ => Err(failed(parse(path))(format!("{text:?} is no pid"))),
        }
    }
}

fn parse(path: &Path) -> String {
    format!("parse {}", path.display())
}

/// Writes a file whole or not at all: readers never see a partial file.
pub fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    let beside = path.with_file_name(name);
    write_new_file(&beside, bytes, 0o644)?;
    fs::rename(&beside, path)
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    let read = unless_absent(fs::read_to_string(path));
    read.map_err(failed(format!("read {}", path.display())))
}

/// The fields of an OCI spec that the shim reads.
///
/// Go's shim and runc read a spec with Go's `encoding/json`, and this parser accepts the same
/// texts: `null` is nothing, of duplicate keys the last counts, objects with equal names are
/// merged. Half of a surrogate pair is U+FFFD, and so is a byte that is not UTF-8. Text after the
/// first JSON value is ignored. Only `annotations` must have the runtime spec's types: the
/// annotations name the pod, and so the shim, of the container. About the types of other fields the
/// runtime complains at `create`.
#[derive(Default)]
pub struct ShimSpec {
    pub annotations: HashMap<String, String>,
    /// The path for the container's cgroup; empty if the spec has none.
    pub cgroups_path: String,
    /// True if the kernel ends all processes of the container with the init: the init must be pid 1
    /// of a separate pid namespace.
    pub has_own_pid_namespace: bool,
}

impl ShimSpec {
    /// Reads the bytes of a `config.json`.
    pub fn parse(bytes: &[u8]) -> serde_json::Result<Self> {
        let mut spec = Self::default();
        let text = String::from_utf8_lossy(bytes);
        let object =
            Option::<RawObject<'_>>::deserialize(&mut serde_json::Deserializer::from_str(&text))?;
        for (key, value) in object.iter().flat_map(RawObject::entries) {
            match key {
                "annotations" => spec.add_annotations(value)?,
                "linux" => spec.add_linux(value),
                _ => {}
            }
        }
        Ok(spec)
    }

    fn add_annotations(&mut self, value: &RawValue) -> serde_json::Result<()> {
        let Some(object) = serde_json::from_str::<Option<RawObject<'_>>>(value.get())? else {
            self.annotations.clear();
            return Ok(());
        };
        for (name, value) in object.entries() {
            let Text(text) =
                serde_json::from_str::<Option<Text<'_>>>(value.get())?.unwrap_or_default();
            self.annotations.insert(name.to_owned(), text.into_owned());
        }
        Ok(())
    }

    fn add_linux(&mut self, value: &RawValue) {
        let Some(object) = read::<RawObject<'_>>(value) else {
            self.cgroups_path.clear();
            self.has_own_pid_namespace = false;
            return;
        };
        for (key, value) in object.entries() {
            match key {
                "cgroupsPath" => {
                    if let Some(Text(path)) = read(value) {
                        self.cgroups_path = path.into_owned();
                    }
                }
                "namespaces" => {
                    let namespaces: Vec<Option<RawObject<'_>>> = read(value).unwrap_or_default();
                    self.has_own_pid_namespace =
                        namespaces.iter().flatten().any(is_own_pid_namespace);
                }
                _ => {}
            }
        }
    }

    /// True if the cgroup path has systemd's form, `slice:prefix:name`. Kubelets with the systemd
    /// driver write it.
    pub fn has_systemds_path(&self) -> bool {
        let parts: Vec<&str> = self.cgroups_path.split(':').collect();
        matches!(parts[..], [slice, _, name] if !name.is_empty() && (slice.is_empty() || slice.ends_with(".slice")))
    }
}

fn is_own_pid_namespace(namespace: &RawObject<'_>) -> bool {
    let (mut kind, mut path) = (Text::default(), Text::default());
    for (key, value) in namespace.entries() {
        match (key, read(value)) {
            ("type", Some(text)) => kind = text,
            ("path", Some(text)) => path = text,
            _ => {}
        }
    }
    kind.0 == "pid" && path.0.is_empty()
}

/// None for `null`, or for a value of a different type.
fn read<'a, T: Deserialize<'a>>(value: &'a RawValue) -> Option<T> {
    serde_json::from_str::<Option<T>>(value.get()).unwrap_or_default()
}

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

/// The first text, or the second if the first is empty.
pub fn given_or<'a>(given: &'a str, other: &'a str) -> &'a str {
    if given.is_empty() { other } else { given }
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
            kind @ (FIRST_SHIMS | GENERIC) => {
                let message = Empty::parse_from_bytes(&any.value).map_err(malformed(kind))?;
                let fields = message.special_fields.unknown_fields();
                if kind == FIRST_SHIMS {
                    return Ok(first_shims_options(fields));
                }
                let (path, table) = (text(fields, 2), text(fields, 3));
                Self::from_file_or_table(&path, table).map_err(OptionsError::Unusable)
            }
            _ => Err(unknown_type(&any.type_url)),
        }
    }

    fn from_file_or_table(path: &str, mut table: String) -> Result<Self> {
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
fn first_shims_options(fields: &UnknownFields) -> Options {
    let number = |field| match fields.get(field) {
        Some(UnknownValueRef::Varint(number)) => number as u32,
        _ => 0,
    };
    Options {
        no_pivot_root: number(1) != 0,
        no_new_keyring: number(8) != 0,
        shim_cgroup: text(fields, 9),
        io_uid: number(10),
        io_gid: number(11),
        criu_work_path: text(fields, 12),
        images_to_restore: text(fields, 13),
        ..Options::default()
    }
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
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn options_survive_the_bundle_and_a_bare_bundle_has_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::at(dir.path());
        assert_eq!(bundle.read_options().unwrap(), Options::default());
        let options = Options {
            binary_name: "crun".into(),
            root: "/r".into(),
            ..Default::default()
        };
        bundle.write_options(&options).unwrap();
        assert_eq!(bundle.read_options().unwrap(), options);
        assert_eq!(
            fs::read_to_string(dir.path().join("runtime")).unwrap(),
            "crun"
        );
    }

    #[test]
    fn a_bundle_is_settled_before_the_runtime_is_called_and_after_all_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::at(dir.path());
        assert!(!bundle.is_settled(), "no spec: unknown");
        fs::write(dir.path().join(CONFIG), "{}").unwrap();
        assert!(bundle.is_settled());
        bundle.write_options(&Options::default()).unwrap();
        assert!(!bundle.is_settled());
        fs::remove_file(dir.path().join(OPTIONS)).unwrap();
        assert!(!bundle.is_settled(), "an older shim's");
        fs::write(bundle.init_pid_file(), "7").unwrap();
        bundle.settle();
        assert!(bundle.is_settled());
        assert!(!bundle.init_pid_file().try_exists().unwrap());
    }

    #[test]
    fn a_pid_file_must_hold_a_pid() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("init.pid");
        fs::write(&file, "4711\n").unwrap();
        assert_eq!(Bundle::read_pid(&file).unwrap(), 4711);
        fs::write(&file, "").unwrap();
        let error = Bundle::read_pid(&file).unwrap_err();
        assert_eq!(error.to_string(), parse(&file));
    }

    fn linux(linux: &str) -> ShimSpec {
        ShimSpec::parse(format!(r#"{{"ociVersion":"1.0.2","linux":{linux}}}"#).as_bytes()).unwrap()
    }

    fn annotation(spec: &str) -> Option<String> {
        ShimSpec::parse(spec.as_bytes())
            .unwrap()
            .annotations
            .remove("a")
    }

    #[test]
    fn systemds_form_of_a_cgroup_path() {
        assert!(
            linux(r#"{"cgroupsPath":"kubepods-pod1.slice:cri-containerd:abc"}"#)
                .has_systemds_path()
        );
        assert!(!linux(r#"{"cgroupsPath":"/kubepods/besteffort/pod1/abc"}"#).has_systemds_path());
        assert!(!linux(r#"{"cgroupsPath":"a:b:c"}"#).has_systemds_path());
        assert!(!linux("{}").has_systemds_path());
    }

    #[test]
    fn only_a_new_pid_namespace_ends_the_children() {
        assert!(linux(r#"{"namespaces":[{"type":"mount"},{"type":"pid"}]}"#).has_own_pid_namespace);
        assert!(
            !linux(r#"{"namespaces":[{"type":"pid","path":"/proc/7/ns/pid"}]}"#)
                .has_own_pid_namespace
        );
        assert!(!linux("{}").has_own_pid_namespace);
    }

    #[test]
    fn annotations_are_read_as_go_reads_them() {
        for (spec, expected) in [
            ("null", None),
            (r#"{"annotations":null,"linux":null}"#, None),
            (r#"{"annotations":{"a":null}}"#, Some("")),
            (r#"{"annotations":{"a":"1","a":"2"}}"#, Some("2")),
            (
                r#"{"annotations":{"a":"1"},"annotations":{"b":"2"}}"#,
                Some("1"),
            ),
            (r#"{"annotations":{"a":"1"},"annotations":null}"#, None),
            (r#"{"\u0061nnotations":{"\u0061":"1"}}"#, Some("1")),
            (
                r#"{"annotations":{"a":"x\ud800y\udc00\ud83d\ude00"}}"#,
                Some("x\u{fffd}y\u{fffd}\u{1f600}"),
            ),
            (
                r#"{"hostname":"\ud800","annotations":{"\udfff":"","a":"1"}} {"annotations":null}"#,
                Some("1"),
            ),
        ] {
            assert_eq!(annotation(spec).as_deref(), expected, "{spec}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_replaced() {
        let spec =
            ShimSpec::parse(b"{\"hostname\":\"\xff\",\"annotations\":{\"a\":\"\xe9!\"}}").unwrap();
        assert_eq!(spec.annotations["a"], "\u{fffd}!");
    }

    #[test]
    fn annotations_that_go_refuses_are_refused() {
        for spec in [
            r#"{"annotations":5}"#,
            r#"{"annotations":{"a":5}}"#,
            r#"["annotations"]"#,
            r#"{"a""#,
            "",
        ] {
            assert!(ShimSpec::parse(spec.as_bytes()).is_err(), "{spec}");
        }
    }

    #[test]
    fn linux_is_read_as_go_reads_it_and_its_types_are_the_runtimes_business() {
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a","cgroupsPath":"/b","cgroupsPath":null}"#).cgroups_path,
            "/b"
        );
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a"},"linux":{"hooks":1}"#).cgroups_path,
            "/a"
        );
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a"},"linux":null"#).cgroups_path,
            ""
        );
        assert!(
            linux(r#"{"namespaces":[null,{"type":"net","type":"pid","path":null}]}"#)
                .has_own_pid_namespace
        );
        for other in [
            "null",
            "5",
            r#"{"cgroupsPath":5,"namespaces":null}"#,
            r#"{"namespaces":[5]}"#,
        ] {
            assert!(!linux(other).has_own_pid_namespace, "{other}");
        }
    }
}

#[cfg(test)]
mod options_tests {
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
        let options = Options::from_any(Some(&any(FIRST_SHIMS, bytes.to_vec()))).unwrap();
        assert!(options.no_pivot_root && !options.no_new_keyring);
        assert_eq!((options.io_uid, options.io_gid), (100_000, 100_000));
    }
}
