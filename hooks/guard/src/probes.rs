//! Probes sources in separate processes, because a probe may hang.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::evidence::{Reach, SubpathEvidence};
use bindguard_core::paths::lies_in;
use bindguard_sys::Mounts;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::probe::{Answer, Patience, probe, probe_side_by_side};

/// Time limit for each source.
const EACH: Duration = Duration::from_millis(700);

/// Time limit for all sources of a create: well within the guard's own deadline.
const OF_A_CREATE: Duration = Duration::from_millis(1200);

/// Additional time limit of all its repairs, whose servers answered a moment ago. A repair probes
/// at least twice, before and after it.
const OF_REPAIRS: Duration = Duration::from_millis(500);

/// Time limit for all sources of a node when an operator waits.
const OF_AN_OPERATOR: Duration = Duration::from_secs(10);

/// A shorter silence proves nothing.
const SHORTEST: Duration = Duration::from_millis(300);

/// The time limits of an admission's probes. The limits follow from the deadline of the guard's
/// caller.
#[derive(Debug, Clone, Copy)]
pub struct ProbeLimits {
    each: Duration,
    sources_until: Instant,
    repairs_until: Instant,
}

impl ProbeLimits {
    /// The limits of a create that began at `start`. Repairs also have the time that the probes of
    /// sources left.
    pub fn of_create(start: Instant) -> Self {
        Self {
            each: EACH,
            sources_until: start + OF_A_CREATE,
            repairs_until: start + OF_A_CREATE + OF_REPAIRS,
        }
    }

    /// The limits of an admission that began at `start`, and whose caller waits this long. A fifth
    /// of the time is left for the verdict and the answer.
    pub fn of_deadline(start: Instant, deadline: Duration) -> Self {
        let until = start + deadline * 4 / 5;
        Self {
            each: (deadline * 3 / 5).clamp(SHORTEST, EACH),
            sources_until: until,
            repairs_until: until,
        }
    }

    pub fn sources(&self) -> Probes {
        Probes::until(self.sources_until, self.each)
    }

    /// Probes during the repairs.
    pub fn repairs(&self) -> Probes {
        Probes::until(self.repairs_until, self.each)
    }
}

/// Limit of sources that are probed at the same time when some do not answer.
const SIDE_BY_SIDE: usize = 32;

/// The answers of a source's paths, in the order of the paths.
#[derive(Debug, Default)]
pub struct Answers(Vec<Answer>);

impl Answers {
    /// The answer of each path, as evidence.
    pub fn reaches(&self) -> Vec<Reach> {
        self.0.iter().map(reach).collect()
    }

    /// The answer of the first path.
    pub fn reach(&self) -> Reach {
        self.0.first().map_or(Reach::NotNeeded, reach)
    }

    /// The first path with its symlinks followed, if it was reached.
    pub fn resolved(&self) -> Option<&Path> {
        match self.0.first()? {
            Answer::Reached(path) => Some(path),
            Answer::Refused(_) | Answer::Silent(_) | Answer::NotProbed => None,
        }
    }
}

/// Probes that share a time limit.
#[derive(Debug)]
pub struct Probes {
    each: Duration,
    until: Instant,
    /// The paths that gave no answer, and the time limit of each probe.
    silent: RefCell<Vec<(PathBuf, Duration)>>,
}

impl Probes {
    /// Starts the time limit now.
    pub fn for_create() -> Self {
        Self::within(OF_A_CREATE)
    }

    /// The time limit of all repairs of a create that began at `start`. Repairs may also use the
    /// time that the sources of the create left.
    pub fn for_repairs(start: Instant) -> Self {
        ProbeLimits::of_create(start).repairs()
    }

    /// Starts the time limit now.
    pub fn for_operator() -> Self {
        Self::within(OF_AN_OPERATOR)
    }

    fn within(patience: Duration) -> Self {
        Self::until(Instant::now() + patience, EACH)
    }

    fn until(until: Instant, each: Duration) -> Self {
        Self {
            each,
            until,
            silent: RefCell::default(),
        }
    }

    /// Probes every source's paths. Returns the answers by source, in the order of the sources.
    pub fn probe(&self, sources: &[Vec<PathBuf>]) -> Vec<Answers> {
        let mut answers = self.probe_all(&sources.concat()).into_iter();
        sources
            .iter()
            .map(|paths| Answers(answers.by_ref().take(paths.len()).collect()))
            .collect()
    }

    /// Returns the answers in the order of the paths. Probes the paths in turn. After the first
    /// silent path, the remaining paths are probed side by side, until no time is left.
    fn probe_all(&self, paths: &[PathBuf]) -> Vec<Answer> {
        let mut answers = Vec::with_capacity(paths.len());
        let mut run_next: fn(&Self, &[PathBuf]) -> Vec<Answer> = Self::one_after_the_other;
        while let Some(next) = paths.get(answers.len()) {
            if let Some(patience) = self.silence_above(next) {
                answers.push(Answer::Silent(patience));
                continue;
            }
            if self.left() < SHORTEST {
                break;
            }
            let rest = &paths[answers.len()..];
            let run = rest
                .iter()
                .take_while(|path| self.silence_above(path).is_none())
                .count();
            let answers_now = run_next(self, &rest[..run]);
            self.note_silence(rest, &answers_now);
            answers.extend(answers_now);
            run_next = Self::side_by_side;
        }
        answers.resize_with(paths.len(), || Answer::NotProbed);
        answers
    }

    /// Probes the paths in turn, up to the first silent path.
    fn one_after_the_other(&self, paths: &[PathBuf]) -> Vec<Answer> {
        let answers_now = probe(
            paths,
            Patience {
                each: self.each,
                all: self.left(),
            },
        )
        .unwrap_or_default();
        answers_now
            .into_iter()
            .take_while(|answer| !matches!(answer, Answer::NotProbed))
            .collect()
    }

    /// Probes the first of them side by side. If no process can be started, no source is called
    /// dead.
    fn side_by_side(&self, paths: &[PathBuf]) -> Vec<Answer> {
        let group = &paths[..paths.len().min(SIDE_BY_SIDE)];
        let answers_now = probe_side_by_side(group, self.left().min(self.each));
        answers_now.unwrap_or_else(|_| group.iter().map(|_| Answer::NotProbed).collect())
    }

    fn note_silence(&self, paths: &[PathBuf], answers_now: &[Answer]) {
        let silent = paths
            .iter()
            .zip(answers_now)
            .filter_map(|(path, answer)| match answer {
                Answer::Silent(patience) => Some((path.clone(), *patience)),
                Answer::Reached(_) | Answer::Refused(_) | Answer::NotProbed => None,
            });
        self.silent.borrow_mut().extend(silent);
    }

    /// A walk to a path passes every folder above the path, so a path below a silent path is
    /// silent.
    fn silence_above(&self, path: &Path) -> Option<Duration> {
        let silent = self.silent.borrow();
        silent
            .iter()
            .find(|(above, _)| lies_in(path, above))
            .map(|(_, patience)| *patience)
    }

    /// The answer of each path, as evidence.
    pub fn reaches(&self, paths: &[PathBuf]) -> Vec<Reach> {
        self.probe_all(paths).iter().map(reach).collect()
    }

    /// Observes subpaths; probes those on servers first.
    pub fn observe(&self, held: &[HeldSubpath], mounts: &Mounts) -> Vec<SubpathEvidence> {
        let paths: Vec<_> = held
            .iter()
            .map(|held| held.paths_to_probe(mounts))
            .collect();
        held.iter()
            .zip(self.probe(&paths))
            .map(|(held, answers)| held.observe(mounts, &answers.reaches()))
            .collect()
    }

    pub fn observe_one(&self, held: &HeldSubpath, mounts: &Mounts) -> SubpathEvidence {
        held.observe(mounts, &self.reaches(&held.paths_to_probe(mounts)))
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => Reach::Refused {
            number: error.raw_os_error().unwrap_or(0),
            words: error.to_string(),
        },
        Answer::Silent(patience) => Reach::Silent(patience.as_millis() as u64),
        // Only paths that must be probed get here.
        Answer::NotProbed => Reach::NotProbed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Less than the shortest patience for a source counts as no time.
    #[test]
    fn repairs_have_the_time_that_the_sources_of_their_create_left() {
        let now = Instant::now();
        assert!(Probes::for_repairs(now).left() > OF_A_CREATE);
        let late = Probes::for_repairs(now - OF_A_CREATE).left();
        assert!(late > SHORTEST && late <= OF_REPAIRS, "{late:?}");
    }

    #[test]
    fn a_source_without_time_for_a_probe_is_not_a_source_without_need_of_one() {
        let too_late = Probes::within(Duration::ZERO);
        assert_eq!(too_late.reaches(&[PathBuf::from("/")]), [Reach::NotProbed]);
        let answers = too_late.probe(&[vec![PathBuf::from("/")], Vec::new()]);
        assert_eq!(
            answers.iter().map(Answers::reach).collect::<Vec<_>>(),
            [Reach::NotProbed, Reach::NotNeeded]
        );
    }
}
