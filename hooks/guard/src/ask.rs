//! Asking sources whether they are alive, by processes that may hang in this one's place.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::evidence::{Reach, SubpathEvidence};
use bindguard_sys::Mounts;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::probe::{Answer, Patience, probe, probe_side_by_side};

/// How long sources that may hang are asked: well within the guard's own deadline.
const PATIENCE: Patience = Patience { each: Duration::from_millis(700), all: Duration::from_millis(1200) };

/// How long an operator waits for all of a node's sources.
const OPERATORS_PATIENCE: Duration = Duration::from_secs(10);

/// How many sources are asked at the same time when some do not answer.
const SIDE_BY_SIDE: usize = 32;

/// The answers of one source's paths, in their order.
#[derive(Debug, Default)]
pub(crate) struct Answers(Vec<Answer>);

impl Answers {
    /// What each path answered, as evidence.
    pub(crate) fn reaches(&self) -> Vec<Reach> {
        self.0.iter().map(reach).collect()
    }

    /// What the first path answered.
    pub(crate) fn reach(&self) -> Reach {
        self.0.first().map_or(Reach::NotAsked, reach)
    }

    /// The first path with its symlinks followed, when it was reached.
    pub(crate) fn resolved(&self) -> Option<&Path> {
        match self.0.first()? {
            Answer::Reached(path) => Some(path),
            Answer::Refused(_) | Answer::Silent | Answer::NotAsked => None,
        }
    }
}

/// How long all sources of a spec may take to answer.
pub(crate) const PATIENCE_OF_A_CREATE: Duration = PATIENCE.all;

/// Asks every source's paths; one set of answers for each, in the same order.
pub(crate) fn ask(sources: &[Vec<PathBuf>]) -> Vec<Answers> {
    let mut left = PATIENCE_OF_A_CREATE;
    ask_within(&mut left, sources)
}

/// The same for some of a spec's sources; what it took is no longer `left` for others.
pub(crate) fn ask_within(left: &mut Duration, sources: &[Vec<PathBuf>]) -> Vec<Answers> {
    let begin = Instant::now();
    // Without a process to ask with, nobody is called dead.
    let answers = probe(&sources.concat(), Patience { all: *left, ..PATIENCE }).unwrap_or_default();
    *left = left.saturating_sub(begin.elapsed());
    shared_out(answers, sources)
}

/// The answers to all paths, by whose they are.
fn shared_out(answers: Vec<Answer>, sources: &[Vec<PathBuf>]) -> Vec<Answers> {
    let mut answers = answers.into_iter();
    let mut answer = |_: &PathBuf| answers.next().unwrap_or(Answer::NotAsked);
    sources.iter().map(|paths| Answers(paths.iter().map(&mut answer).collect())).collect()
}

/// Somebody who can wait longer than a create can, but for all of a node's sources together.
#[derive(Debug)]
pub(crate) struct Asking {
    until: Instant,
}

impl Asking {
    /// Begins now.
    pub(crate) fn of_an_operator() -> Self {
        Self { until: Instant::now() + OPERATORS_PATIENCE }
    }

    /// What each path answers, in their order. They are asked one after the other; once one is silent, the rest is asked
    /// side by side, until there is no time left.
    fn ask(&self, paths: &[PathBuf]) -> Vec<Answer> {
        let all = self.left();
        if all.is_zero() {
            return paths.iter().map(|_| Answer::NotAsked).collect();
        }
        // Without a process to ask with, nobody is called dead.
        let mut answers = probe(paths, Patience { all, ..PATIENCE }).unwrap_or_default();
        answers.truncate(answers.iter().take_while(|answer| !matches!(answer, Answer::NotAsked)).count());
        while answers.len() < paths.len() && self.left() >= PATIENCE.each {
            let group = &paths[answers.len()..paths.len().min(answers.len() + SIDE_BY_SIDE)];
            match probe_side_by_side(group, PATIENCE.each) {
                Ok(more) => answers.extend(more),
                Err(_) => break,
            }
        }
        answers.resize_with(paths.len(), || Answer::NotAsked);
        answers
    }

    /// What each path answers, as evidence.
    pub(crate) fn reaches(&self, paths: &[PathBuf]) -> Vec<Reach> {
        self.ask(paths).iter().map(reach).collect()
    }

    /// Looks at subpaths, those on servers after asking them.
    pub(crate) fn observe(&self, held: &[HeldSubpath], mounts: &Mounts) -> Vec<SubpathEvidence> {
        let paths: Vec<_> = held.iter().map(|held| held.to_ask(mounts)).collect();
        let answers = shared_out(self.ask(&paths.concat()), &paths);
        held.iter().zip(answers).map(|(held, answers)| held.observe(mounts, &answers.reaches())).collect()
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// Looks at one subpath.
pub(crate) fn observe(held: &HeldSubpath, mounts: &Mounts) -> SubpathEvidence {
    let [answers] = &ask(&[held.to_ask(mounts)])[..] else { return held.observe(mounts, &[]) };
    held.observe(mounts, &answers.reaches())
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => {
            Reach::Refused { number: error.raw_os_error().unwrap_or(0), words: error.to_string() }
        }
        Answer::Silent => Reach::Silent(PATIENCE.each.as_millis() as u64),
        Answer::NotAsked => Reach::NotAsked,
    }
}
