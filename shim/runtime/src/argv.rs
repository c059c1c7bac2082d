//! The command line of an OCI runtime, parsed only as far as needed to find the bundle.
//!
//! Follows runc's `main.go`, `create.go` and `run.go`, and crun's `crun(1)`. Arguments are passed on
//! unchanged. runc, crun and youki read some forms of a flag differently, and later versions have
//! more flags: a call with such an argument is in doubt, because the runtime may read another
//! bundle.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bindguard_core::handover::{DETACH_VERB, PROVE_VERB, UNCHECKED_VERB};

/// Flags that take the next argument as their value: global flags, and flags of the verbs that
/// create.
const WITH_VALUE: [&str; 26] = [
    "b",
    "bundle",
    "c",
    "cgroup-manager",
    "config",
    "console-socket",
    "criu",
    "empty-ns",
    "f",
    "handler",
    "image-path",
    "l",
    "log",
    "log-format",
    "log-level",
    "lsm-mount-context",
    "lsm-profile",
    "manage-cgroups-mode",
    "p",
    "pid-file",
    "pidfd-socket",
    "preserve-fds",
    "r",
    "root",
    "rootless",
    "work-path",
];

/// The same without a value.
const WITHOUT_VALUE: [&str; 23] = [
    "?",
    "V",
    "auto-dedup",
    "d",
    "debug",
    "detach",
    "ext-unix-sk",
    "file-locks",
    "h",
    "help",
    "keep",
    "lazy-pages",
    "network-lock",
    "no-new-keyring",
    "no-pivot",
    "no-subreaper",
    "s",
    "shell-job",
    "systemd-cgroup",
    "tcp-close",
    "tcp-established",
    "v",
    "version",
];

/// The verbs that make a container from a bundle. A restored container also has its binds from the
/// spec's sources.
pub const CREATING: [&str; 3] = ["create", "run", "restore"];

/// The verbs of runc, crun, youki, and bindguard's own. A word before one of them that is no flag is
/// the value of a flag that is not known here.
const VERBS: [&str; 26] = [
    DETACH_VERB,
    PROVE_VERB,
    UNCHECKED_VERB,
    "checkpoint",
    "completion",
    "create",
    "delete",
    "events",
    "exec",
    "features",
    "h",
    "help",
    "info",
    "init",
    "kill",
    "list",
    "mounts",
    "pause",
    "ps",
    "restore",
    "resume",
    "run",
    "spec",
    "start",
    "state",
    "update",
];

/// A call that creates a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// The bundle: `--bundle`, else the working directory.
    pub bundle: PathBuf,
    /// The container's id, if it is text.
    pub id: Option<String>,
    /// True for the verb `create`.
    pub is_create: bool,
    /// The directory of the runtime's state: `--root`.
    pub root: Option<PathBuf>,
    /// crun's `--config`, if it is not the bundle's own `config.json`.
    pub spec: Option<PathBuf>,
    /// True if the runtime may read another verb.
    pub is_verb_in_doubt: bool,
    /// The reason why the runtime may read another spec than that of the bundle.
    pub doubt: Option<String>,
    pub log: Log,
}

/// The runtime's log file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// `--log`
    pub file: Option<PathBuf>,
    /// True for `--log-format json`.
    pub is_json: bool,
}

impl Invocation {
    /// The same call with absolute paths. crun takes a relative spec from the working directory, and
    /// the name `config.json` from the bundle: `crun_run_create_internal`.
    #[expect(
        clippy::disallowed_methods,
        reason = "a spec, not the source of a container's bind"
    )]
    pub fn with_absolute_paths(mut self) -> Self {
        if let Ok(bundle) = std::path::absolute(&self.bundle) {
            self.bundle = bundle;
        }
        // An edit must not replace a symlink by a file.
        if let Some(spec) = self.spec.as_ref().and_then(|spec| spec.canonicalize().ok()) {
            self.spec = Some(spec);
        }
        if self.spec == Some(self.bundle.join("config.json")) {
            self.spec = None;
        }
        self
    }

    /// The spec that the runtime reads.
    pub fn spec_file(&self) -> PathBuf {
        let own = || self.bundle.join("config.json");
        self.spec.clone().unwrap_or_else(own)
    }

    /// Parses the arguments after the program's name. `None` if `wanted` does not have the verb.
    pub fn of_verbs(args: &[OsString], wanted: &[&str]) -> Option<Self> {
        let line = CommandLine::parse(args);
        let verb = line.verb()?;
        if line.is_one_of(verb, wanted) {
            return Some(line.invocation(verb));
        }
        // An unknown flag before the verb may have taken that word as its value.
        let (before, _) = line.unknown.filter(|(before, _)| *before <= verb)?;
        let later = (before..line.plain.len()).find(|at| line.is_one_of(*at, wanted))?;
        Some(Self {
            is_verb_in_doubt: true,
            ..line.invocation(later)
        })
    }

    /// Parses the arguments of a verb of bindguard's own: those of a runtime's `create`, and more
    /// plain arguments. Returns the verb as well.
    pub fn of_own_verb(args: &[OsString]) -> Option<(&'static str, Self, Vec<&OsStr>)> {
        let line = CommandLine::parse(args);
        let verb = line.verb()?;
        let own = [DETACH_VERB, PROVE_VERB, UNCHECKED_VERB];
        let name = own.into_iter().find(|own| line.plain[verb] == *own)?;
        let invocation = line.invocation(verb);
        let more = line.plain.into_iter().skip(verb + 2).collect();
        Some((name, invocation, more))
    }
}

#[derive(Default)]
struct CommandLine<'a> {
    /// The arguments that are neither flags nor values of flags.
    plain: Vec<&'a OsStr>,
    /// The flags with a value, and their values.
    values: Vec<(&'a OsStr, &'a OsStr)>,
    /// The first flag that a runtime may read differently: the number of plain arguments before it,
    /// and its text.
    unknown: Option<(usize, &'a OsStr)>,
}

impl<'a> CommandLine<'a> {
    fn parse(args: &'a [OsString]) -> Self {
        let mut line = Self::default();
        let mut rest = args.iter().map(OsString::as_os_str);
        let mut only_plain = false;
        while let Some(arg) = rest.next() {
            if only_plain || arg == "-" || !arg.as_bytes().starts_with(b"-") {
                line.plain.push(arg);
                continue;
            }
            if arg == "--" {
                // Before the verb, this ends only the global flags.
                only_plain = line.verb().is_some();
                continue;
            }
            let (name, mut value, is_certain) = split(arg);
            if value.is_none() && WITH_VALUE.iter().any(|known| name == *known) {
                value = rest.next();
            }
            if !is_certain && line.unknown.is_none() {
                line.unknown = Some((line.plain.len(), arg));
            }
            line.values.extend(value.map(|value| (name, value)));
        }
        line
    }

    /// The position of the verb among the plain arguments.
    fn verb(&self) -> Option<usize> {
        (0..self.plain.len()).find(|at| self.is_one_of(*at, &VERBS))
    }

    fn is_one_of(&self, at: usize, words: &[&str]) -> bool {
        words.iter().any(|word| self.plain[at] == *word)
    }

    /// The value of the last flag with one of these names.
    fn value_of(&self, names: &[&str]) -> Option<&'a OsStr> {
        let mut last_first = self.values.iter().rev();
        let (_, value) = last_first.find(|(name, _)| names.iter().any(|known| name == known))?;
        Some(value)
    }

    /// The call of the verb at this position.
    fn invocation(&self, verb: usize) -> Invocation {
        let path_of = |names: &[&str]| self.value_of(names).map(PathBuf::from);
        let id = self.plain.get(verb + 1);
        Invocation {
            id: id.and_then(|id| id.to_str()).map(str::to_owned),
            bundle: path_of(&["bundle", "b"]).unwrap_or_else(|| ".".into()),
            is_create: self.is_one_of(verb, &["create"]),
            root: path_of(&["root", "r"]),
            spec: path_of(&["config", "f"]).filter(|spec| spec.as_os_str() != "config.json"),
            is_verb_in_doubt: false,
            doubt: self.unknown.map(|(_, flag)| {
                format!("the argument {flag:?} is not understood, and may name another bundle")
            }),
            log: Log {
                file: path_of(&["log"]).filter(|path| !path.as_os_str().is_empty()),
                is_json: self.value_of(&["log-format"]) == Some(OsStr::new("json")),
            },
        }
    }
}

/// Splits a flag into name and value, and returns true if all runtimes that accept the flag read it
/// in this way. The value is `None` if it is the next argument.
///
/// runc accepts one dash before any name (`-bundle DIR`), which crun and youki read as short flags
/// (`-b undle`). In `-b=DIR` the value begins after the `=` for runc, and with the `=` for crun. crun
/// also accepts the beginning of a name (`--bun DIR`).
fn split(arg: &OsStr) -> (&OsStr, Option<&OsStr>, bool) {
    let (flag, is_long) = match arg.as_bytes() {
        [b'-', b'-', flag @ ..] => (flag, true),
        [b'-', flag @ ..] | flag => (flag, false),
    };
    let (name, value, is_of_runc) = match (flag, flag.iter().position(|b| *b == b'=')) {
        // No name of runc begins like this.
        ([b'b' | b'f', b'/' | b'.', ..], _) if !is_long => (&flag[..1], Some(&flag[1..]), false),
        (_, Some(at)) => (&flag[..at], Some(&flag[at + 1..]), true),
        (_, None) => (flag, None, true),
    };
    let name = OsStr::from_bytes(name);
    let mut known = WITH_VALUE.iter().chain(&WITHOUT_VALUE);
    let is_known = known.any(|known| name == *known);
    let is_certain = is_known && (is_long || name.len() == 1 && value.is_none());
    let value = value.map(OsStr::from_bytes);
    (name, value, is_certain || !is_of_runc)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parsed(line: &str) -> Option<Invocation> {
        let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Invocation::of_verbs(&args, &CREATING)
    }

    fn bundle_of(line: &str) -> Option<(PathBuf, Option<String>)> {
        parsed(line).map(|invocation| (invocation.bundle, invocation.id))
    }

    fn doubt(line: &str) -> Option<String> {
        parsed(line).and_then(|invocation| invocation.doubt)
    }

    fn found(bundle: &str, id: &str) -> Option<(PathBuf, Option<String>)> {
        Some((bundle.into(), Some(id.to_owned())))
    }

    #[test]
    fn the_bundle_is_found_among_flags_of_every_form() {
        for line in [
            "--root /run/r --log /l/create --log-format json --systemd-cgroup create --bundle /b --pid-file /p c1",
            "create -b /b c1",
            "--log=/l --debug create --no-pivot --bundle=/b c1",
            "--rootless auto create --bundle /b -- c1",
            "create c1 --bundle /b",
            "create -b/b c1",
            "-- create --bundle /b c1",
            "--root /r -- create --bundle /b -- c1",
            "run --pidfd-socket /run c1 -b/b",
            "restore --image-path /i --work-path /w -d --bundle=/b c1",
        ] {
            assert_eq!(bundle_of(line), found("/b", "c1"), "{line}");
            assert_eq!(doubt(line), None, "{line}");
        }
        assert_eq!(bundle_of("create - -b /b"), found("/b", "-"));
    }

    /// The first reading of such a call is runc's.
    #[test]
    fn a_flag_that_runtimes_read_differently_is_a_doubt() {
        for (line, flag) in [
            ("-root /r run -d --bundle /b --keep c1", "-root"),
            ("create -bundle /b c1", "-bundle"),
            ("create -b=/b c1", "-b=/b"),
            ("create --bundle /b --future value c1", "--future"),
            (
                "--future value --other create --bundle /b --preserve-fds 3 c1",
                "--future",
            ),
            ("create --bun /c --bundle /b c1", "--bun"),
            ("run -db /c --bundle /b c1", "-db"),
            ("create -bcc --bundle /b c1", "-bcc"),
            ("create --bundle /b c1 ---", "---"),
        ] {
            let expected = Some(format!(
                "the argument {flag:?} is not understood, and may name another bundle"
            ));
            assert_eq!(doubt(line), expected, "{line}");
            assert_eq!(bundle_of(line).map(|found| found.0), Some("/b".into()));
        }
    }

    /// The flag may have taken the word as its value.
    #[test]
    fn a_verb_behind_an_unknown_flag_is_a_doubt_if_another_verb_creates() {
        for line in ["--log-f state run -b /b c1", "-x start create -b /b c1"] {
            assert!(doubt(line).is_some(), "{line}");
            assert!(parsed(line).unwrap().is_verb_in_doubt, "{line}");
        }
        for line in ["-x state c1", "state -x run", "exec -x c1 create"] {
            assert_eq!(bundle_of(line), None, "{line}");
        }
    }

    #[test]
    fn without_a_bundle_it_is_the_working_directory() {
        assert_eq!(
            bundle_of("create c1"),
            Some((PathBuf::from("."), Some("c1".to_owned())))
        );
    }

    #[test]
    fn a_flag_that_begins_like_a_short_one_is_not_it() {
        assert_eq!(
            bundle_of("create -bogus -future=a/b c1"),
            Some((PathBuf::from("."), Some("c1".to_owned())))
        );
    }

    #[test]
    fn a_spec_beside_the_bundle_is_noticed() {
        for (line, other) in [
            ("create -f /o c1", Some("/o")),
            ("run --config=o -b /b c1", Some("o")),
            ("run --config config.json -b /b c1", None),
            ("create -b /f c1", None),
        ] {
            let invocation = parsed(line).unwrap();
            assert_eq!(
                (invocation.spec.as_deref(), invocation.doubt),
                (other.map(Path::new), None),
                "{line}"
            );
        }
    }

    #[test]
    fn paths_are_made_absolute_as_crun_does() {
        let here = std::env::current_dir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (own, link) = (
            folder.path().join("config.json"),
            folder.path().join("link"),
        );
        std::fs::write(&own, "{}").unwrap();
        std::os::unix::fs::symlink("config.json", &link).unwrap();
        let absolute = |line: &str| {
            let call = parsed(line).unwrap().with_absolute_paths();
            (call.bundle, call.spec)
        };
        assert_eq!(absolute("create c1"), (here.clone(), None));
        assert_eq!(absolute("create -b b c1"), (here.join("b"), None));
        let spec = |bundle: &str, spec: &Path| {
            absolute(&format!("create -b {bundle} -f {} c1", spec.display())).1
        };
        assert_eq!(spec("/b", &link), Some(own.clone()));
        assert_eq!(spec(&folder.path().display().to_string(), &link), None);
        assert_eq!(spec("/b", Path::new("/gone")), Some("/gone".into()));
        assert_eq!(
            absolute("create -f Cargo.toml c1").1,
            Some(here.join("Cargo.toml"))
        );
    }

    #[test]
    fn other_verbs_create_nothing() {
        for line in [
            "start c1",
            "--root create delete c1",
            "exec c1 create",
            "--version",
            "",
            "kill run KILL",
            "--log create state run",
            "update --pids-limit 5 create",
            "mounts add create",
        ] {
            assert_eq!(bundle_of(line), None, "{line}");
        }
    }

    #[test]
    fn a_start_is_found_with_its_state_directory() {
        let start = |line: &str| {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            Invocation::of_verbs(&args, &["start"]).map(|it| (it.id, it.root))
        };
        assert_eq!(
            start("--root /r --log /l --log-format json start c1"),
            Some((Some("c1".to_owned()), Some("/r".into())))
        );
        assert_eq!(start("-r /r start c1"), start("--root=/r start c1"));
        assert_eq!(start("start c1"), Some((Some("c1".to_owned()), None)));
        assert_eq!(start("exec c1 start c2"), None);
        assert_eq!(start("create start"), None);
        assert_eq!(
            start("--log-f state start c1"),
            Some((Some("c1".to_owned()), None))
        );
    }

    #[test]
    fn a_verb_of_bindguards_own_is_found_only_as_the_verb() {
        let more = |line: &str| {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            let (verb, _, more) = Invocation::of_own_verb(&args)?;
            (verb == PROVE_VERB).then(|| more.join(OsStr::new(" ")))
        };
        for line in [
            "--log /l bindguard-prove --bundle /b c1 5",
            "bindguard-prove c1 5",
        ] {
            assert_eq!(more(line), Some("5".into()), "{line}");
        }
        for line in [
            "exec c1 bindguard-prove a 5",
            "bindguard-unchecked bindguard-prove a 5",
        ] {
            assert_eq!(more(line), None, "{line}");
        }
    }

    #[test]
    fn the_log_is_found() {
        let args: Vec<OsString> = ["--log", "/l.json", "--log-format", "json", "create", "x"]
            .map(OsString::from)
            .into();
        let invocation = Invocation::of_verbs(&args, &CREATING).unwrap();
        assert_eq!(
            (invocation.log.file.as_deref(), invocation.log.is_json),
            (Some(Path::new("/l.json")), true)
        );
    }
}
