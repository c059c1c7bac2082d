//! The files of a bundle that the shim reads and writes.
//!
//! `runtime`, `options.json` and `init.pid` have the names and forms of Go's shim: after a crash,
//! `delete` may have to work on a bundle of Go's shim, or of any version of this shim. These files
//! are written before the first call of the runtime and removed when nothing of the container is
//! left. The shim reads a few fields of `config.json` and never writes it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::spec::{RawObject, Text};
use bindguard_sys::write_new_file;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::options::Options;
use crate::step::{StepError, failed};

const CONFIG: &str = "config.json";
/// The options of the container's runtime.
const OPTIONS: &str = "options.json";
/// The runtime's name alone; shims older than `options.json` read it.
const RUNTIME: &str = "runtime";

#[derive(Debug, Clone)]
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
    pub fn spec(&self) -> Result<ShimSpec, StepError> {
        let path = self.path.join(CONFIG);
        let bytes = fs::read(&path).map_err(failed(format!("read {}", path.display())))?;
        ShimSpec::parse(&bytes).map_err(failed(parse(&path)))
    }

    /// Saves the options of this container's runtime for `delete`.
    pub fn write_options(&self, options: &Options) -> Result<(), StepError> {
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
    pub fn read_options(&self) -> Result<Options, StepError> {
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
    pub fn read_pid(path: &Path) -> Result<u32, StepError> {
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

fn read_if_there(path: &Path) -> Result<Option<String>, StepError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(format!("read {}", path.display()))(source)),
    }
}

/// The fields of an OCI spec that the shim reads.
///
/// Go's shim and runc read a spec with Go's `encoding/json`, and this parser accepts the same
/// texts: `null` is nothing, of duplicate keys the last counts, objects with equal names are
/// merged. Half of a surrogate pair is U+FFFD, and so is a byte that is not UTF-8. Text after the
/// first JSON value is ignored. Only `annotations` must have the runtime spec's types: the
/// annotations name the pod, and so the shim, of the container. About the types of other fields the
/// runtime complains at `create`.
#[derive(Debug, Default)]
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
