//! Two guards see a full journal, and each guard is stopped at the moment of the possible race. The
//! full file is rotated once, and no line of the last two files is lost.

use bindguard_integration::bundle::Bundle;
use bindguard_integration::journal::{ROTATED, fill, lines};
use bindguard_integration::prelude::*;
use bindguard_integration::stopped::StoppedGuard;

#[test]
fn a_guard_that_comes_late_to_a_full_journal_leaves_the_new_one_alone() {
    Setup::on(Generation::NEWEST).fault_points().story(|node| {
        let bundle = Bundle::create(node, "full", b"{}")?;
        let full = fill()? + 2;
        // it has written to the full file, and not yet checked its size
        let late = StoppedGuard::at("journaled", "", bundle.admit(node)?)?;
        run(bundle.admit(node)?)?.success()?;
        ensure!(
            counts()? == [0, full],
            "the second guard did not move it away: {:?}",
            counts()?
        );
        run(bundle.admit(node)?)?.success()?;
        late.go_on()?;
        ensure!(
            counts()? == [1, full],
            "a new journal was moved over the full one: {:?}",
            counts()?
        );
        Ok(())
    });
}

#[test]
fn a_journal_that_one_guard_is_moving_away_is_not_moved_by_another() {
    Setup::on(Generation::NEWEST).fault_points().story(|node| {
        let bundle = Bundle::create(node, "full", b"{}")?;
        let full = fill()? + 3;
        let first = StoppedGuard::at("rotating", "", bundle.admit(node)?)?;
        for _ in 0..2 {
            run(bundle.admit(node)?)?.success()?;
        }
        ensure!(
            counts()? == [full, 0],
            "moved although another guard is about to: {:?}",
            counts()?
        );
        first.go_on()?;
        run(bundle.admit(node)?)?.success()?;
        ensure!(
            counts()? == [1, full],
            "it was not moved once: {:?}",
            counts()?
        );
        Ok(())
    });
}

/// The lines of the journal, and of the rotated journal.
fn counts() -> Result<[usize; 2]> {
    Ok([lines(JOURNAL)?.len(), lines(ROTATED)?.len()])
}
