//! The journal's directory is read-only, or its disk is full: the container starts, the stale
//! subpath is repaired, and the log says that the journal is without this line.

use bindguard_integration::prelude::*;
use bindguard_integration::stale::StaleBundle;

const DIRECTORY: &str = "/run/bindguard";

#[test]
fn read_only_or_full() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let mut stale = StaleBundle::lay_out(node, "unwritten")?;
    fs::create_dir_all(DIRECTORY).context("make the journal's directory")?;
    for (options, words) in [("ro", "Read-only"), ("size=4k", "")] {
        tmpfs(DIRECTORY, options)?;
        if options != "ro" {
            fs::write(Path::new(DIRECTORY).join("filler"), [0; 4096])
                .context("fill the journal's disk")?;
        }
        stale.begin_anew()?;
        run(stale.guard(&[])?)?.success()?;
        stale.is_repaired()?;
        let log = stale.bundle().log()?;
        ensure!(
            log.contains("append to /run/bindguard/journal.jsonl: ") && log.contains(words),
            "{options}: {log}"
        );
        unmount(DIRECTORY)?;
    }
    stale.begin_anew()?;
    stale.next_create()?;
    stale.delete()
}
