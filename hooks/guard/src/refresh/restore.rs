//! Restores the propagation that an interrupted refresh left changed, from its record.

use bindguard_core::refresh::{is_record_needed, left_shared};
use bindguard_sys::enter::{Action, Entered, Replacement};

use super::outcome::RefreshError;
use super::progress::{ContainerRefresh, STEP_TIMEOUT};
use super::records::TuckRecordError;

impl ContainerRefresh<'_> {
    /// Sets every mount that a tuck left shared to its former propagation. At the end of a refresh
    /// the record is removed: until then a mount beneath a stale mount may be shared. What could not
    /// be restored is left to the next refresh, with the record. Returns true if a mount was changed.
    pub(super) fn restore_propagation(&mut self, is_end: bool) -> Result<bool, RefreshError> {
        let before = match self.records.load(self.process, self.namespace) {
            Ok(Some(before)) => before,
            Ok(None) => return Ok(false),
            Err(TuckRecordError::Process(error)) => return Err(error.into()),
            // The record stays.
            Err(TuckRecordError::Read { .. } | TuckRecordError::Write { .. }) => return Ok(false),
        };
        let now = self.namespace.mounts()?;
        let left = left_shared(&before, &now, &self.volumes.shown_in(&now));
        let mounts = left.iter().map(|stale| Replacement {
            stale,
            parent: None,
            new: None,
        });
        let is_restored = left.is_empty() || self.restored(mounts.collect());
        if is_end && is_restored && !is_record_needed(&before, &now, &left) {
            self.records.forget(self.process);
        }
        Ok(!left.is_empty())
    }

    fn restored(&mut self, mounts: Vec<Replacement<'_>>) -> bool {
        let all: Vec<usize> = (0..mounts.len()).collect();
        let Ok(entered) = Entered::enter(
            self.helper,
            self.namespace,
            mounts,
            STEP_TIMEOUT,
            self.until,
        ) else {
            return false;
        };
        // The walk to a mount point may hang, as in any refresh.
        let opened = entered.call_all(Action::Open, &all);
        if opened
            .iter()
            .any(|opened| opened.as_ref().is_err_and(|error| error.is_over()))
        {
            self.abandoned = Some(entered.abandon());
            return false;
        }
        let is_restored = |(index, opened): (usize, _)| {
            matches!(opened, Ok(())) && entered.call(Action::Restore, index).is_ok()
        };
        // A failure does not stop the remaining restores.
        opened
            .into_iter()
            .enumerate()
            .map(is_restored)
            .fold(true, |all, one| all & one)
    }
}
