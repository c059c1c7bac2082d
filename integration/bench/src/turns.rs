//! Measures every candidate once in a round. Each round begins with a different candidate, so that
//! a drift of the machine affects all candidates equally. Medians are taken over the rounds.

use anyhow::{Context, Result};

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

/// The first round warms caches up and is not counted.
const WARM_UP: usize = 1;

/// Measures each candidate in turns; `at` is as for [`Results::add`].
pub fn in_turns(
    results: &mut Results,
    rounds: usize,
    candidates: &[Candidate],
    at: u64,
    mut once: impl FnMut(Candidate) -> Result<Vec<(Figure, f64)>>,
) -> Result<()> {
    for round in 0..WARM_UP + rounds {
        for turn in 0..candidates.len() {
            let candidate = candidates[(round + turn) % candidates.len()];
            let figures =
                once(candidate).with_context(|| format!("measure {}", candidate.title()))?;
            if round >= WARM_UP {
                figures
                    .into_iter()
                    .for_each(|(figure, value)| results.add(figure, candidate, at, value));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_one_begins_each_round_and_the_first_round_is_not_counted() {
        let (mut results, mut order) = (Results::default(), Vec::new());
        let pair = [Candidate::Bindguard, Candidate::Rust];
        in_turns(&mut results, 2, &pair, 0, |candidate| {
            order.push(candidate);
            Ok(vec![(Figure::Threads, order.len() as f64)])
        })
        .unwrap();
        let [ours, theirs] = pair;
        assert_eq!(order, [ours, theirs, theirs, ours, ours, theirs]);
        assert_eq!(results.median(Figure::Threads, ours, 0), Some(5.0));
        assert_eq!(results.median(Figure::Threads, theirs, 0), Some(6.0));
    }
}
