//! A step of the node's clock changes no interval: only these files read the wall clock, and each
//! of them for time stamps.
//!
//! A test cannot set the machine's clock, and a time namespace has no wall clock. Instead, the test
//! knows the files that read the wall clock.

use bindguard_integration::prelude::*;
use std::collections::BTreeSet;

/// The crates that the agent and the guard are made of.
const CRATES: [&str; 6] = [
    "hooks/core",
    "hooks/sys",
    "hooks/guard",
    "hooks/operator",
    "config",
    "shim/agent",
];

/// The readers: the time of a journal's line; the times of events, of the last survey, of the last
/// repair and of the start.
const READERS: [&str; 4] = [
    // Compares the birth of a folder, a time stamp, with the start of a container.
    "hooks/guard/src/refresh/files.rs",
    // Compares the time stamp of a file with the present: an old count is no figure.
    "hooks/operator/src/root_program.rs",
    "hooks/sys/src/journal.rs",
    "shim/agent/src/limits.rs",
];

const CALLS: [&str; 5] = [
    "SystemTime::now",
    "now_utc",
    "now_local",
    "CLOCK_REALTIME",
    "ClockId::Realtime",
];

#[test]
fn only_time_stamps_read_the_wall_clock() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("find the workspace")?;
    let mut readers = BTreeSet::new();
    for name in CRATES {
        for file in sources(&root.join(name).join("src"))? {
            let text =
                fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
            if CALLS.iter().any(|call| text.contains(call)) {
                readers.insert(file.strip_prefix(root)?.display().to_string());
            }
        }
    }
    ensure!(
        readers == READERS.map(str::to_owned).into(),
        "these files read the wall clock: {readers:?}"
    );
    Ok(())
}

fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}
