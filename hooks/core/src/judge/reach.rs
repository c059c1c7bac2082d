//! Detects a dead source: its server, or the daemon behind it, is gone or does not answer.

use crate::evidence::Reach;

use super::verdict::Verdict;

/// Judges a source's answer; `None` if it is not dead, or if that is unknown. A source not probed
/// for lack of time may be dead.
pub fn judge_reach(reach: &Reach) -> Option<Verdict> {
    match reach {
        Reach::Silent(milliseconds) => Some(Verdict::Dead(format!(
            "it did not answer within {milliseconds} ms"
        ))),
        Reach::NotProbed => Some(Verdict::NotProbed),
        reach => reach
            .error_of_dead_source()
            .map(|words| Verdict::Dead(format!("it answers: {words}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_not_there_is_not_dead() {
        let refused = |number| {
            judge_reach(&Reach::Refused {
                number,
                words: String::new(),
            })
        };
        assert_eq!((refused(2), refused(13), refused(20)), (None, None, None));
        assert!(refused(107).is_some() && refused(116).is_some());
        assert_eq!(
            (
                judge_reach(&Reach::NotProbed),
                judge_reach(&Reach::NotNeeded)
            ),
            (Some(Verdict::NotProbed), None)
        );
    }
}
