//! Records the change of a file, then makes the change.

use anyhow::{Result, ensure};

use crate::change::{Change, NewAttributes};
use crate::plan::PlannedChange;
use crate::record::Record;
use crate::runtimes;

/// Records a change, then makes it. Uninstall restores the content from before the *first* install.
/// If the file was edited since then, uninstall restores the edited file without bindguard in it.
pub fn put(record: &mut Record, step: &PlannedChange) -> Result<()> {
    let (owner, change) = (step.owner, &step.change);
    ensure!(
        runtimes::may_write(owner, &change.path),
        "{} {}: `uninstall` would refuse to write such a file for {}; a file of containerd needs a name that ends in .toml",
        change.word(),
        change.path.display(),
        owner.name()
    );
    let original = match &change.before {
        Some(before) => runtimes::without_bindguard(owner, &change.path, before, record)?,
        None => None,
    };
    let is_new = record.entry(&change.path).is_none();
    record.note(step, original.as_ref())?;
    record.owe(owner, step.command.as_deref())?;
    let former = record
        .entry(&change.path)
        .and_then(|entry| entry.attributes.clone());
    let applied = match former {
        // a restored file also gets its former modification time
        Some(former) if change.after == original => {
            let attributes = NewAttributes::Former(former);
            let change = change.clone();
            Change {
                attributes,
                ..change
            }
            .apply()
        }
        _ => change.apply(),
    };
    let is_gone = applied.is_ok() && change.after.is_none();
    if is_gone || applied.is_err() && is_new {
        record.forget(&change.path)?;
    }
    applied
}
