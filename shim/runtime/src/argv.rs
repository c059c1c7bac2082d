//! The command line of an OCI runtime, read no further than is needed to find the bundle.
//!
//! Follows runc's `main.go`, `create.go` and `run.go`, and crun's `crun(1)`: flags with one dash or two, values behind
//! `=` or in the next argument. Arguments are handed on as they came, so a flag that is not known here does no harm.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Flags that take the next argument as their value, global ones and those of `create` and `run`.
const WITH_VALUE: [&str; 15] = [
    "b",
    "bundle",
    "cgroup-manager",
    "config",
    "console-socket",
    "criu",
    "f",
    "log",
    "log-format",
    "log-level",
    "pid-file",
    "preserve-fds",
    "root",
    "rootless",
    "handler",
];

/// The verbs of runc, crun and youki. What stands before one of them and is no flag is the value of a flag that is not
/// known here.
const VERBS: [&str; 19] = [
    "checkpoint",
    "create",
    "delete",
    "events",
    "exec",
    "features",
    "help",
    "info",
    "init",
    "kill",
    "list",
    "pause",
    "ps",
    "restore",
    "resume",
    "run",
    "spec",
    "start",
    "state",
];

/// A call that creates a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// The bundle: `--bundle`, else the working directory.
    pub bundle: PathBuf,
    /// The container's id, when it is text.
    pub id: Option<String>,
    /// Where the runtime logs to: `--log`.
    pub log: Option<PathBuf>,
    /// Whether it logs JSON: `--log-format json`.
    pub log_is_json: bool,
}

impl Invocation {
    /// Reads the arguments behind the program's name. `None` when they do not create a container.
    pub fn creating(args: &[OsString]) -> Option<Self> {
        let words = words(args);
        let verb =
            words.iter().position(|word| matches!(word, Word::Plain(name) if VERBS.iter().any(|v| name == v)))?;
        let Word::Plain(name) = &words[verb] else { return None };
        (*name == "create" || *name == "run").then(|| Self::behind_verb(&words, verb).0)
    }

    /// Reads the arguments of a verb of bindguard's own: what a runtime's `create` has, and more plain arguments.
    pub fn of_own_verb<'a>(args: &'a [OsString], name: &str) -> Option<(Self, Vec<&'a OsStr>)> {
        let words = words(args);
        let verb = words.iter().position(|word| matches!(word, Word::Plain(plain) if *plain == name))?;
        Some(Self::behind_verb(&words, verb))
    }

    fn behind_verb<'a>(words: &[Word<'a>], verb: usize) -> (Self, Vec<&'a OsStr>) {
        let value = |names: &[&str]| words.iter().rev().find_map(|word| word.value_of(names));
        let mut plain = words[verb + 1..].iter().filter_map(Word::plain);
        let invocation = Self {
            id: plain.next().and_then(OsStr::to_str).map(str::to_owned),
            bundle: value(&["bundle", "b"]).map_or_else(|| PathBuf::from("."), PathBuf::from),
            log: value(&["log"]).filter(|path| !path.is_empty()).map(PathBuf::from),
            log_is_json: value(&["log-format"]).is_some_and(|format| format == "json"),
        };
        (invocation, plain.collect())
    }
}

/// An argument, or two that belong together.
enum Word<'a> {
    Flag { name: &'a OsStr, value: Option<&'a OsStr> },
    Plain(&'a OsStr),
}

impl<'a> Word<'a> {
    fn value_of(&self, names: &[&str]) -> Option<&'a OsStr> {
        match self {
            Self::Flag { name, value } if names.iter().any(|n| name == n) => *value,
            Self::Flag { .. } | Self::Plain(_) => None,
        }
    }

    fn plain(&self) -> Option<&'a OsStr> {
        match self {
            Self::Plain(word) => Some(word),
            Self::Flag { .. } => None,
        }
    }
}

fn words(args: &[OsString]) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut rest = args.iter().map(OsString::as_os_str);
    let mut only_plain = false;
    while let Some(arg) = rest.next() {
        let flag = arg.as_bytes().strip_prefix(b"-").map(|flag| flag.strip_prefix(b"-").unwrap_or(flag));
        match flag {
            _ if only_plain => words.push(Word::Plain(arg)),
            None => words.push(Word::Plain(arg)),
            Some(b"") => only_plain = arg == "--",
            Some(flag) => words.push(match flag.iter().position(|b| *b == b'=') {
                Some(at) => {
                    Word::Flag { name: OsStr::from_bytes(&flag[..at]), value: Some(OsStr::from_bytes(&flag[at + 1..])) }
                }
                None => {
                    let name = OsStr::from_bytes(flag);
                    let value = if WITH_VALUE.iter().any(|known| name == *known) { rest.next() } else { None };
                    Word::Flag { name, value }
                }
            }),
        }
    }
    words
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
        ] {
            assert_eq!(bundle_of(line), Some((PathBuf::from("/b"), Some("c1".to_owned()))), "{line}");
        }
    }

    #[test]
    fn without_a_bundle_it_is_the_working_directory() {
        assert_eq!(bundle_of("create c1"), Some((PathBuf::from("."), Some("c1".to_owned()))));
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
        ] {
            assert_eq!(bundle_of(line), None, "{line}");
        }
    }

    #[test]
    fn the_log_is_found() {
        let args: Vec<OsString> =
            ["--log", "/l.json", "--log-format", "json", "create", "x"].map(OsString::from).into();
        let invocation = Invocation::creating(&args).unwrap();
        assert_eq!((invocation.log.as_deref(), invocation.log_is_json), (Some(Path::new("/l.json")), true));
    }
}
