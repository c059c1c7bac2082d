//! The pods and containers that wait for a refresh, and those in work.
//!
//! Several workers take them from a queue: most of a refresh is a wait, for the kernel's RCU grace
//! period after each detach and for a processor. Workers start when there is work, and end when
//! there is none: an idle agent keeps no stacks for them. A subject has one worker at a time: so no
//! container is refreshed twice at once, and the updates of a volume arrive in order.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::error;

use crate::sinks::metrics::Total;
use crate::work::Node;

/// The turn of a pod or container. A slow container waits until every other container had a first
/// turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// After an update.
    First,
    /// For containers that needed more time than the first turn has.
    Last,
    /// After a last turn that failed. A child that still hangs in the container is not waited for:
    /// many such containers would keep the workers busy.
    Retry,
}

/// A pod or container that is to be refreshed, and when that was planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The uid of a pod, or the id of a container.
    pub id: String,
    /// A moment after the update of a volume, and after the re-bind of its subpaths on the host.
    pub at: Instant,
    pub turn: Turn,
    /// The plan waits until this moment, because an earlier try failed.
    pub not_before: Option<Instant>,
}

/// The end of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    Done,
    /// It needs more time, or a later try may succeed.
    OutOfTime,
    /// The runtime did not answer: the same turn comes again.
    Unanswered,
}

/// The first pause before a refresh that failed is tried again, and the longest: a survey finds the
/// container again by then.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(300);

/// Limit of workers in a last turn: the rest of the workers is free for first turns.
const MAX_LATE: usize = 8;

/// Workers that begin at once: eight took more processor time for each file (docs/decisions/0014).
const SIDE_BY_SIDE: usize = 2;

/// Limit of workers. A worker may wait for a container, and must not delay the others.
const MAX_WORKERS: usize = 32;

/// The interval at which a further worker starts while plans wait.
const WORKER_INTERVAL: Duration = Duration::from_millis(100);

/// The refreshes that are planned, for any thread.
#[derive(Debug, Default)]
pub struct RefreshQueue {
    state: Mutex<QueueState>,
    planned: Condvar,
}

impl RefreshQueue {
    /// Plans a refresh.
    pub fn plan(&self, id: String) {
        self.state().waiting.push(Planned {
            id,
            at: Instant::now(),
            turn: Turn::First,
            not_before: None,
        });
        self.planned.notify_one();
    }

    /// True if further plans wait for a worker.
    pub fn others_wait(&self) -> bool {
        self.state().others_wait()
    }

    /// Refreshes what is planned, for ever. `kind`: what the ids name.
    pub fn run(&self, node: &Node, kind: &str, refresh: impl Fn(&Planned) -> TurnEnd + Sync) {
        let work = || {
            let mut next = self.state().next(None);
            while let Some(planned) = next {
                let ended = catch_unwind(AssertUnwindSafe(|| refresh(&planned)));
                let ended = ended.unwrap_or_else(|_| {
                    error!("refresh {kind}{}: the thread panicked", planned.id);
                    node.metrics[Total::AgentThreadRestarts].inc();
                    TurnEnd::Done
                });
                let mut queue = self.state();
                queue.plan_again(&planned, ended);
                next = queue.next(Some(&planned));
            }
        };
        node.retry_with_backoff("refresh containers", || {
            thread::scope(|scope| {
                let mut limit = SIDE_BY_SIDE;
                loop {
                    let mut queue = self.state();
                    if queue.needs_worker(limit) {
                        drop(queue);
                        limit = SIDE_BY_SIDE;
                        let worker = thread::Builder::new().name("refresh-pod".to_owned());
                        if worker.spawn_scoped(scope, work).is_err() {
                            // Without a new thread, this thread refreshes in sequence.
                            work();
                        }
                    } else if queue.workers > 0 || queue.others_wait() {
                        let waited = self.planned.wait_timeout(queue, WORKER_INTERVAL);
                        let waited = waited.unwrap_or_else(PoisonError::into_inner);
                        // Without news for a moment, the workers wait for containers.
                        if waited.1.timed_out() {
                            limit = MAX_WORKERS;
                        }
                    } else if let Some(due) = queue.due() {
                        let pause = due.saturating_duration_since(Instant::now());
                        drop(self.planned.wait_timeout(queue, pause));
                    } else {
                        drop(self.planned.wait(queue));
                    }
                }
            })
        });
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The plans that wait, the subjects that are refreshed, and the number of workers.
#[derive(Debug, Default)]
struct QueueState {
    waiting: Vec<Planned>,
    /// The subjects that have a worker.
    busy: HashSet<String>,
    workers: usize,
    /// The workers that do a last turn.
    late: usize,
}

impl QueueState {
    /// Counts a further worker if a plan could begin, and fewer than these work. Returns true if
    /// the caller has to start it.
    fn needs_worker(&mut self, limit: usize) -> bool {
        let needs = self.workers < limit && self.free().is_some();
        self.workers += usize::from(needs);
        needs
    }

    /// The plan that is next: of the first turns the oldest, then of the last turns.
    fn free(&self) -> Option<usize> {
        let now = Instant::now();
        let mut free: Option<usize> = None;
        for (index, planned) in self.waiting.iter().enumerate() {
            let may_begin = planned.is_due(now)
                && !self.busy.contains(&planned.id)
                && (planned.turn == Turn::First || self.late < MAX_LATE);
            if may_begin && free.is_none_or(|free| planned.turn < self.waiting[free].turn) {
                free = Some(index);
            }
        }
        free
    }

    /// A plan for the worker that returns from `done`, or has just started. `None` ends the worker.
    /// A refresh serves all waiting plans for the subject.
    fn next(&mut self, done: Option<&Planned>) -> Option<Planned> {
        if let Some(done) = done {
            self.busy.remove(&done.id);
            self.late -= usize::from(done.turn != Turn::First);
        }
        let Some(index) = self.free() else {
            self.workers -= 1;
            return None;
        };
        let mut next = self.waiting.remove(index);
        let id = next.id.clone();
        for same in self.waiting.extract_if(.., |it| it.id == id) {
            next.at = next.at.max(same.at);
        }
        self.busy.insert(id);
        self.late += usize::from(next.turn != Turn::First);
        Some(next)
    }

    /// Plans the turn that follows `done`. Each pause is as long as all earlier pauses together, so a
    /// container that hangs for hours costs few tries.
    fn plan_again(&mut self, done: &Planned, ended: TurnEnd) {
        let (turn, is_later) = match (ended, done.turn) {
            (TurnEnd::Done, _) => return,
            (TurnEnd::OutOfTime, Turn::First) => (Turn::Last, false),
            (TurnEnd::OutOfTime, Turn::Last | Turn::Retry) => (Turn::Retry, true),
            (TurnEnd::Unanswered, turn) => (turn, true),
        };
        let pause = done.at.elapsed().clamp(RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        self.waiting.push(Planned {
            turn,
            not_before: is_later.then(|| Instant::now() + pause),
            ..done.clone()
        });
    }

    /// The moment at which the first of the later plans is due.
    fn due(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|it| it.not_before).min()
    }

    fn others_wait(&self) -> bool {
        let now = Instant::now();
        self.waiting.iter().any(|planned| planned.is_due(now))
    }
}

impl Planned {
    fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|moment| moment <= now)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    fn planned(id: &str, at: Instant) -> Planned {
        Planned {
            id: id.to_owned(),
            at,
            turn: Turn::First,
            not_before: None,
        }
    }

    impl QueueState {
        /// True if the plan needs a further worker.
        fn add(&mut self, planned: Planned, limit: usize) -> bool {
            self.waiting.push(planned);
            self.needs_worker(limit)
        }
    }

    #[test]
    fn a_plan_that_is_due_later_waits_and_joins_a_new_plan() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        queue.add(planned("a", now), 1);
        let first = queue.next(None).unwrap();
        queue.plan_again(&first, TurnEnd::Unanswered);
        assert_eq!(queue.next(Some(&first)), None);
        assert!(!queue.others_wait() && queue.due().is_some());
        assert!(queue.add(planned("a", now), 1));
        let second = queue.next(None).unwrap();
        assert_eq!((second.not_before, queue.due()), (None, None));
        let later = Planned {
            not_before: Some(now),
            ..second.clone()
        };
        queue.waiting.push(later);
        assert!(queue.others_wait());
        assert_eq!(queue.next(Some(&second)).unwrap().id, second.id);
    }

    #[test]
    fn the_pauses_of_a_refresh_that_fails_grow() {
        for (waited, least) in [(0, 4), (100, 90), (100_000, 290)] {
            let mut queue = QueueState::default();
            let at = Instant::now() - Duration::from_secs(waited);
            queue.plan_again(&planned("a", at), TurnEnd::Unanswered);
            let pause = queue.due().unwrap() - Instant::now();
            assert!((least..=300).contains(&pause.as_secs()), "{pause:?}");
        }
    }

    #[test]
    fn a_subject_has_one_worker_at_a_time() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        assert!(queue.add(planned("a", now), 2));
        let first = queue.next(None).unwrap();
        let later = now + Duration::from_secs(1);
        assert!(!queue.add(planned("a", later), 2), "its worker takes it");
        assert!(queue.add(planned("b", now), 2));
        let second = queue.next(None).unwrap();
        assert_eq!((first.id.as_str(), second.id.as_str()), ("a", "b"));
        assert_eq!(queue.next(Some(&second)), None, "the other pod is busy");
        assert_eq!(queue.next(Some(&first)).unwrap().at, later);
    }

    #[test]
    fn one_refresh_does_all_plans_of_a_subject() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        queue.add(planned("a", now), 1);
        queue.add(planned("b", now), 1);
        queue.add(planned("a", later), 1);
        let first = queue.next(None).unwrap();
        assert_eq!((first.id.as_str(), first.at), ("a", later));
        assert!(queue.others_wait());
        let second = queue.next(Some(&first)).unwrap();
        assert_eq!(second.id, "b");
        assert!(!queue.others_wait());
        assert_eq!(queue.next(Some(&second)), None);
    }

    #[test]
    fn workers_are_few_and_end() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        let started = ["a", "b", "c"].map(|pod| queue.add(planned(pod, now), 2));
        assert_eq!(started, [true, true, false]);
        let (first, second) = (queue.next(None).unwrap(), queue.next(None).unwrap());
        let third = queue.next(Some(&first)).unwrap();
        assert_eq!(
            (queue.next(Some(&second)), queue.next(Some(&third))),
            (None, None)
        );
        assert!(queue.add(planned("a", now), 1), "both ended");
    }

    #[test]
    fn a_last_turn_comes_after_all_first_turns() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        for pod in ["slow", "b", "c"] {
            queue.add(planned(pod, now), 1);
        }
        let slow = queue.next(None).unwrap();
        queue.plan_again(&slow, TurnEnd::OutOfTime);
        let order = ["b", "c", "slow"].map(|_| ());
        let mut done = slow;
        let names = order.map(|()| {
            done = queue.next(Some(&done)).unwrap();
            (done.id.clone(), done.turn)
        });
        let expected = [("b", Turn::First), ("c", Turn::First), ("slow", Turn::Last)];
        assert_eq!(names, expected.map(|(pod, turn)| (pod.to_owned(), turn)));
        // An update meanwhile gives it a first turn again.
        queue.plan_again(&planned("slow", now), TurnEnd::OutOfTime);
        queue.add(planned("slow", now), 1);
        let next = queue.next(Some(&done)).unwrap();
        assert_eq!((next.turn, queue.others_wait()), (Turn::First, false));
    }

    #[test]
    fn last_turns_leave_workers_for_first_turns() {
        let (mut queue, now) = (QueueState::default(), Instant::now());
        let slow = |pod: usize| Planned {
            turn: Turn::Last,
            ..planned(&format!("slow-{pod}"), now)
        };
        for pod in 0..40 {
            queue.add(slow(pod), 40);
        }
        let started = (0..40).filter(|_| queue.needs_worker(40)).count();
        let taken: Vec<_> = (0..40).map_while(|_| queue.next(None)).collect();
        assert_eq!(taken.len(), MAX_LATE, "of {started} workers");
        assert!(queue.add(planned("quick", now), 40));
        assert_eq!(queue.next(None).unwrap().id, "quick");
    }

    /// More subjects than workers at once, a slow one and one that panics.
    #[test]
    fn every_plan_gets_its_turns() {
        let turns = std::sync::Arc::new(RefreshQueue::default());
        let (ended, all) = std::sync::mpsc::channel();
        let running = std::sync::Arc::clone(&turns);
        thread::spawn(move || {
            running.run(Node::silent(""), "", |planned| {
                let _ = ended.send((planned.id.clone(), planned.turn));
                match (planned.id.as_str(), planned.turn) {
                    ("slow", Turn::First) => TurnEnd::OutOfTime,
                    ("bad", _) => panic!("as expected by a test"),
                    _ => TurnEnd::Done,
                }
            })
        });
        let names = ["slow", "bad", "a", "b", "c"];
        for subject in names {
            turns.plan(subject.to_owned());
        }
        let mut expected: Vec<_> = names.map(|name| (name.to_owned(), Turn::First)).into();
        expected.push(("slow".to_owned(), Turn::Last));
        let limit = Duration::from_secs(60);
        let mut had: Vec<_> = (0..6).map(|_| all.recv_timeout(limit).unwrap()).collect();
        had.sort();
        expected.sort();
        assert_eq!(had, expected);
    }
}
