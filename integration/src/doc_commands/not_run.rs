//! The commands that no story runs, with the reasons.

/// A command that a document shows and no story runs.
#[derive(Clone, Copy, Debug)]
pub struct NotRun {
    /// The document.
    pub document: &'static str,
    /// The beginning of the command.
    pub command: &'static str,
    /// The command that runs instead.
    pub instead: &'static str,
    /// Why.
    pub why: &'static str,
}

/// All of them.
pub const NOT_RUN: [NotRun; 6] = [
    NotRun {
        document: "README.md",
        command: "make demo",
        instead: "make --dry-run demo",
        why: "it builds; demo_leaves_nothing_behind.rs runs the demo",
    },
    NotRun {
        document: "README.md",
        command: "make test",
        instead: "make --dry-run test",
        why: "it is what runs the stories",
    },
    NotRun {
        document: "README.md",
        command: "make build",
        instead: "make --dry-run build",
        why: "it builds; what it builds is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "sh integration/matrix/fetch.sh",
        instead: "sh -n integration/matrix/fetch.sh",
        why: "it fetches hundreds of megabytes; what it lays out is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo build --workspace",
        instead: "test -f Cargo.toml",
        why: "it builds",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo test -p bindguard-integration --test it -- updates_during_starts::",
        instead: "test -f integration/tests/it/updates_during_starts.rs",
        why: "it is a story beside this one",
    },
];
