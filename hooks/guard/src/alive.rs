//! Which of many sources answer, asked for an operator who can wait longer than a create can.
//!
//! One that is silent ends a round; the ones behind it get a round of their own, until there is no time left.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::evidence::Reach;
use bindguard_sys::probe::{Answer, Patience, probe};

/// For one source.
const EACH: Duration = Duration::from_millis(700);
/// For all of them.
const ALL: Duration = Duration::from_secs(10);

/// What each of these sources answers, in their order. Without a process to ask with, nobody was asked.
pub(crate) fn ask(paths: &[PathBuf]) -> Vec<Reach> {
    let (start, mut reaches) = (Instant::now(), Vec::new());
    while reaches.len() < paths.len() {
        let left = ALL.saturating_sub(start.elapsed());
        let answers = probe(&paths[reaches.len()..], Patience { each: EACH, all: left }).unwrap_or_default();
        let heard = answers.iter().take_while(|answer| !matches!(answer, Answer::NotAsked));
        let before = reaches.len();
        reaches.extend(heard.map(reach));
        if reaches.len() == before {
            reaches.resize(paths.len(), Reach::NotAsked);
        }
    }
    reaches
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => {
            Reach::Refused { number: error.raw_os_error().unwrap_or(0), words: error.to_string() }
        }
        Answer::Silent => Reach::Silent(EACH.as_millis() as u64),
        Answer::NotAsked => Reach::NotAsked,
    }
}
