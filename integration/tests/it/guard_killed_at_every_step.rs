//! The guard is killed at each of its steps. After a kill at any step, the next create ends with a
//! single mount at the path, current content, an edited spec, and no leftovers. No reader ever saw
//! the file underneath.

use bindguard_integration::prelude::*;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::PollingReader;
use bindguard_integration::journal;
use bindguard_integration::stale::StaleBundle;

/// Steps only of the repair on kernels before 6.5.
const TUCK: [&str; 3] = ["namespace-unshared", "copy-attached", "tucked"];
/// Steps of a guard with a full journal.
const ROTATION: [&str; 2] = ["rotating", "rotated"];

#[test]
fn mounting_beneath() {
    Setup::on(Generation::V1_7)
        .fault_points()
        .story(|node| story(node, ""));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::V1_7)
        .fault_points()
        .story(|node| story(node, "no-beneath"));
}

fn story(node: &Node, way: &str) -> Result<()> {
    let mut stale = StaleBundle::lay_out(node, "killed")?;
    let reader = PollingReader::start(stale.subpath().target());
    let places = stale.fault_points()?;
    ensure!(
        places.iter().any(|place| place == "after-attach"),
        "the guard knows these places only: {places:?}"
    );
    for place in &places {
        for updated_again in [false, true] {
            let what = format!("killed at {place}, updated again: {updated_again}");
            stale.begin_anew()?;
            if ROTATION.contains(&place.as_str()) {
                journal::fill()?;
            }
            kill(&stale, way, place).context(what.clone())?;
            if updated_again {
                stale.update()?;
            }
            stale.next_create().context(what)?;
        }
    }
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0 && seen.reads > 1000,
        "a reader saw the file underneath: {seen:?}"
    );
    stale.delete()
}

/// A guard that is killed at `place`, if it gets there.
fn kill(stale: &StaleBundle<'_>, way: &str, place: &str) -> Result<()> {
    let mut guard = stale.guard(&[])?;
    guard.env("BINDGUARD_FAULT", format!("{way},{place}"));
    let ended = run(guard)?;
    let is_on_its_way = way == "no-beneath" || !TUCK.contains(&place);
    let expected = if is_on_its_way { Some(9) } else { None };
    ensure!(
        ended.status.signal() == expected,
        "it ended otherwise: {ended:?}"
    );
    Ok(())
}
