//! The statuses of reaped orphans, for as long as an orphan may be the process of a running call.
//!
//! Calls and orphans are numbered in the order of their arrival. An orphan that was reaped before a
//! call began is not that call's process, whatever its pid.

use std::collections::{BTreeSet, VecDeque};

use super::Exit;

/// The largest number of statuses: a call may hang for ever in a pod whose containers leave orphans
/// all the time. Beyond it the oldest status is dropped. If that was a call's process, it is
/// reported with a lost status.
const MAX_STATUSES: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Statuses {
    last: u64,
    calls: BTreeSet<u64>,
    kept: VecDeque<OrphanStatus>,
}

#[derive(Debug)]
struct OrphanStatus {
    number: u64,
    pid: u32,
    exit: Exit,
}

impl Statuses {
    /// Returns the call's number.
    pub(super) fn begin_call(&mut self) -> u64 {
        self.last += 1;
        self.calls.insert(self.last);
        self.last
    }

    /// Drops the statuses that no running call may need.
    pub(super) fn end_call(&mut self, number: u64) {
        self.calls.remove(&number);
        match self.calls.first() {
            Some(oldest) => {
                let needless = self.kept.partition_point(|kept| kept.number < *oldest);
                self.kept.drain(..needless);
            }
            // Frees the memory as well.
            None => self.kept = VecDeque::new(),
        }
    }

    /// Keeps the status of an orphan, if a call is running.
    pub(super) fn keep(&mut self, pid: u32, exit: Exit) {
        if self.calls.is_empty() {
            return;
        }
        if self.kept.len() >= MAX_STATUSES {
            self.kept.pop_front();
        }
        self.last += 1;
        self.kept.push_back(OrphanStatus {
            number: self.last,
            pid,
            exit,
        });
    }

    /// The status of the last orphan of that pid that was reaped since a call began.
    pub(super) fn find(&self, since: u64, pid: u32) -> Option<Exit> {
        let newest_first = self
            .kept
            .iter()
            .rev()
            .take_while(|kept| kept.number > since);
        newest_first
            .into_iter()
            .find(|kept| kept.pid == pid)
            .map(|kept| kept.exit)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn exit(status: u32) -> Exit {
        Exit {
            status,
            at: SystemTime::now(),
        }
    }

    fn found(statuses: &Statuses, since: u64, pid: u32) -> Option<u32> {
        statuses.find(since, pid).map(|exit| exit.status)
    }

    #[test]
    fn a_call_finds_orphans_reaped_since_it_began() {
        let mut statuses = Statuses::default();
        statuses.keep(7, exit(1));
        let early = statuses.begin_call();
        statuses.keep(7, exit(2));
        let late = statuses.begin_call();
        assert_eq!(
            (found(&statuses, early, 7), found(&statuses, late, 7)),
            (Some(2), None)
        );
        statuses.keep(7, exit(3));
        assert_eq!(
            (found(&statuses, early, 7), found(&statuses, late, 7)),
            (Some(3), Some(3))
        );
        statuses.end_call(early);
        assert_eq!(
            (statuses.kept.len(), found(&statuses, late, 7)),
            (1, Some(3))
        );
        statuses.end_call(late);
        assert_eq!((statuses.kept.len(), statuses.kept.capacity()), (0, 0));
    }

    #[test]
    fn a_hanging_call_keeps_a_limited_number_of_statuses() {
        let mut statuses = Statuses::default();
        let hanging = statuses.begin_call();
        for pid in 0..10_000 {
            statuses.keep(pid, exit(pid));
        }
        assert_eq!(statuses.kept.len(), MAX_STATUSES);
        assert_eq!(
            (
                found(&statuses, hanging, 0),
                found(&statuses, hanging, 9999)
            ),
            (None, Some(9999))
        );
    }
}
