//! The configMap changes while the guard is at each of its steps. A change before the guard's final
//! check is repaired in the same create. After a later change the next create repairs the mount.
//! Nothing is left over.

use bindguard_integration::PollingReader;
use bindguard_integration::prelude::*;
use bindguard_integration::stale::StaleBundle;
use bindguard_integration::stopped::StoppedGuard;

/// Steps only of the repair on kernels before 6.5.
const TUCK: [&str; 3] = ["namespace-unshared", "copy-attached", "tucked"];
/// Steps with a journal that is full.
const ROTATION: [&str; 2] = ["rotating", "rotated"];

#[test]
fn mounting_beneath() {
    Setup::on(Generation::NEWEST)
        .fault_points()
        .story(|node| story(node, ""));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::NEWEST)
        .fault_points()
        .story(|node| story(node, "no-beneath,"));
}

fn story(node: &Node, way: &str) -> Result<()> {
    let mut stale = StaleBundle::lay_out(node, "changes")?;
    let reader = PollingReader::start(stale.subpath().target());
    let places = stale.fault_points()?;
    let verified = places
        .iter()
        .position(|place| place == "verified")
        .context("the guard verifies its work")?;
    for (number, place) in places.iter().map(String::as_str).enumerate() {
        if ROTATION.contains(&place) || way.is_empty() && TUCK.contains(&place) {
            continue;
        }
        stale.begin_anew()?;
        let guard = StoppedGuard::at(place, way, stale.guard(&[])?)?;
        stale.update()?;
        guard
            .go_on()
            .with_context(|| format!("changed at {place}"))?;
        if number < verified {
            stale
                .is_repaired()
                .with_context(|| format!("changed at {place}"))?;
        }
        stale
            .next_create()
            .with_context(|| format!("after a change at {place}"))?;
    }
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0 && seen.reads > 1000,
        "a reader saw the file underneath: {seen:?}"
    );
    stale.delete()
}
