//! The command line of an OCI runtime, parsed only as far as needed to find the bundle.
//!
//! Follows runc's `main.go`, `create.go` and `run.go`, and crun's `crun(1)`: flags with one or two
//! dashes, values after `=` or in the next argument. Arguments are passed on unchanged, so an
//! unknown flag does no harm.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bindguard_core::handover::{PROVE_VERB, UNCHECKED_VERB};

/// Flags that take the next argument as their value: global flags, and flags of the verbs that
/// create.
const WITH_VALUE: [&str; 23] = [
    "b",
    "bundle",
    "cgroup-manager",
    "config",
    "console-socket",
    "criu",
    "empty-ns",
    "f",
    "handler",
    "image-path",
    "log",
    "log-format",
    "log-level",
    "lsm-mount-context",
    "lsm-profile",
    "manage-cgroups-mode",
    "pid-file",
    "pidfd-socket",
    "preserve-fds",
    "r",
    "root",
    "rootless",
    "work-path",
];

/// The verbs that make a container from a bundle. A restored container also has its binds from the
/// spec's sources.
const CREATING: [&str; 3] = ["create", "run", "restore"];

/// The verbs of runc, crun, youki, and bindguard's own. A word before one of them that is no flag is
/// the value of a flag that is not known here.
const VERBS: [&str; 25] = [
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
    /// True if the spec is not the bundle's: crun's `--config`.
    pub other_spec: bool,
    /// The runtime's log file: `--log`.
    pub log: Option<PathBuf>,
    /// True if the log is JSON: `--log-format json`.
    pub log_is_json: bool,
}

impl Invocation {
    /// Parses the arguments after the program's name. `None` if they do not create a container.
    pub fn creating(args: &[OsString]) -> Option<Self> {
        Self::of_verbs(args, &CREATING).map(|(invocation, _)| invocation)
    }

    /// Parses the arguments of a runtime's `start`. `None` for any other verb.
    pub fn of_start(args: &[OsString]) -> Option<Self> {
        Self::of_verbs(args, &["start"]).map(|(invocation, _)| invocation)
    }

    /// Parses the arguments of a verb of bindguard's own: those of a runtime's `create`, and more
    /// plain arguments.
    pub fn of_own_verb<'a>(args: &'a [OsString], name: &str) -> Option<(Self, Vec<&'a OsStr>)> {
        Self::of_verbs(args, &[name])
    }

    /// True if there is a spec to admit, which the runtime will read too.
    pub fn has_spec(&self) -> bool {
        !self.other_spec
            && fs::metadata(self.bundle.join("config.json")).is_ok_and(|meta| meta.is_file())
    }

    /// The call, and the plain arguments after the container's id.
    fn of_verbs<'a>(args: &'a [OsString], wanted: &[&str]) -> Option<(Self, Vec<&'a OsStr>)> {
        let arguments = arguments(args);
        let is_verb = |plain: &OsStr| VERBS.iter().any(|verb| plain == *verb);
        let verb = arguments
            .iter()
            .position(|argument| argument.plain().is_some_and(is_verb))?;
        let name = arguments[verb].plain()?;
        if !wanted.iter().any(|wanted| name == *wanted) {
            return None;
        }
        let value = |names: &[&str]| {
            arguments
                .iter()
                .rev()
                .find_map(|argument| argument.value_of(names))
        };
        let mut plain = arguments[verb + 1..].iter().filter_map(Argument::plain);
        let invocation = Self {
            id: plain.next().and_then(OsStr::to_str).map(str::to_owned),
            bundle: value(&["bundle", "b"]).map_or_else(|| PathBuf::from("."), PathBuf::from),
            is_create: name == "create",
            root: value(&["root", "r"]).map(PathBuf::from),
            other_spec: value(&["config", "f"]).is_some(),
            log: value(&["log"])
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            log_is_json: value(&["log-format"]).is_some_and(|format| format == "json"),
        };
        Some((invocation, plain.collect()))
    }
}

/// An argument, or a flag with its value.
enum Argument<'a> {
    Flag {
        name: &'a OsStr,
        value: Option<&'a OsStr>,
    },
    Plain(&'a OsStr),
}

impl<'a> Argument<'a> {
    fn value_of(&self, names: &[&str]) -> Option<&'a OsStr> {
        match self {
            Self::Flag { name, value } if names.iter().any(|n| name == n) => *value,
            Self::Flag { .. } | Self::Plain(_) => None,
        }
    }

    fn plain(&self) -> Option<&'a OsStr> {
        match self {
            Self::Plain(argument) => Some(argument),
            Self::Flag { .. } => None,
        }
    }
}

fn arguments(args: &[OsString]) -> Vec<Argument<'_>> {
    let mut arguments = Vec::new();
    let mut rest = args.iter().map(OsString::as_os_str);
    let mut only_plain = false;
    while let Some(arg) = rest.next() {
        let flag = arg
            .as_bytes()
            .strip_prefix(b"-")
            .map(|flag| flag.strip_prefix(b"-").unwrap_or(flag));
        match flag {
            _ if only_plain => arguments.push(Argument::Plain(arg)),
            None => arguments.push(Argument::Plain(arg)),
            Some(b"") => only_plain = arg == "--",
            Some(flag) => arguments.push(match split(flag) {
                (name, None) if WITH_VALUE.iter().any(|known| name == *known) => Argument::Flag {
                    name,
                    value: rest.next(),
                },
                (name, value) => Argument::Flag { name, value },
            }),
        }
    }
    arguments
}

/// Splits a flag without its dashes into name and value. crun allows a value without `=`
/// (`-b/path`). The value is `None` if it is the next argument.
fn split(flag: &[u8]) -> (&OsStr, Option<&OsStr>) {
    let (name, value) = match (flag, flag.iter().position(|b| *b == b'=')) {
        ([b'b' | b'f', b'/' | b'.', ..], _) => (&flag[..1], Some(&flag[1..])),
        (_, Some(at)) => (&flag[..at], Some(&flag[at + 1..])),
        (_, None) => (flag, None),
    };
    (OsStr::from_bytes(name), value.map(OsStr::from_bytes))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn bundle_of(line: &str) -> Option<(PathBuf, Option<String>)> {
        let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Invocation::creating(&args).map(|invocation| (invocation.bundle, invocation.id))
    }

    #[test]
    fn the_bundle_is_found_among_flags_of_every_form() {
        for line in [
            "--root /run/r --log /l/create --log-format json --systemd-cgroup create --bundle /b --pid-file /p c1",
            "create -b /b c1",
            "--log=/l --debug create --no-pivot --bundle=/b c1",
            "-root /r run -d -bundle /b --keep c1",
            "--future-flag value --other create --bundle /b --preserve-fds 3 c1",
            "--rootless auto create --unknown --bundle /b -- c1",
            "create c1 --bundle /b",
            "create -b/b c1",
            "run --pidfd-socket /run c1 -b/b",
            "restore --image-path /i --work-path /w -d --bundle=/b c1",
        ] {
            assert_eq!(
                bundle_of(line),
                Some((PathBuf::from("/b"), Some("c1".to_owned()))),
                "{line}"
            );
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
            ("create -f /o c1", true),
            ("run --config=o -b /b c1", true),
            ("create -b /f c1", false),
        ] {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            assert_eq!(
                Invocation::creating(&args).map(|invocation| invocation.other_spec),
                Some(other),
                "{line}"
            );
        }
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
            Invocation::of_start(&args).map(|it| (it.id, it.root))
        };
        assert_eq!(
            start("--root /r --log /l --log-format json start c1"),
            Some((Some("c1".to_owned()), Some("/r".into())))
        );
        assert_eq!(start("-r /r start c1"), start("--root=/r start c1"));
        assert_eq!(start("start c1"), Some((Some("c1".to_owned()), None)));
        assert_eq!(start("exec c1 start c2"), None);
        assert_eq!(start("create start"), None);
    }

    #[test]
    fn a_verb_of_bindguards_own_is_found_only_as_the_verb() {
        let more = |line: &str| {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            Invocation::of_own_verb(&args, PROVE_VERB).map(|(_, more)| more.join(OsStr::new(" ")))
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
        let invocation = Invocation::creating(&args).unwrap();
        assert_eq!(
            (invocation.log.as_deref(), invocation.log_is_json),
            (Some(Path::new("/l.json")), true)
        );
    }
}
