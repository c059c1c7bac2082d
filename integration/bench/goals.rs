//! What is wanted of each figure, and whether it was reached.

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

/// What is wanted of one figure of bindguard.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    /// What is measured.
    pub figure: Figure,
    /// At which number of containers, pods or mounts; 0 where there is none.
    pub at: u64,
    /// How much it may be.
    pub limit: Limit,
}

/// How much a figure may be.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// In the figure's unit.
    AtMost(f64),
    /// This part of a peer's.
    Of(Candidate, f64),
}

/// Everything that is wanted.
pub const GOALS: [Goal; 9] = [
    Goal { figure: Figure::PrivateDirty, at: 1, limit: Limit::AtMost(300.0) },
    Goal { figure: Figure::PrivateDirty, at: 5, limit: Limit::AtMost(450.0) },
    Goal { figure: Figure::Pss, at: 50, limit: Limit::Of(Candidate::Go21, 1.0 / 8.0) },
    Goal { figure: Figure::Threads, at: 0, limit: Limit::AtMost(1.0) },
    Goal { figure: Figure::WakeUps, at: 0, limit: Limit::AtMost(0.0) },
    Goal { figure: Figure::StartWall, at: 0, limit: Limit::AtMost(2.0) },
    Goal { figure: Figure::StartCommandCpu, at: 0, limit: Limit::AtMost(1.0) },
    Goal { figure: Figure::StartCpu, at: 0, limit: Limit::AtMost(1.0) },
    Goal { figure: Figure::LifeCpu, at: 0, limit: Limit::Of(Candidate::Rust, 0.9) },
];

impl Goal {
    /// What bindguard reached.
    pub fn ours(&self, results: &Results) -> Option<f64> {
        results.median(self.figure, Candidate::Bindguard, self.at)
    }

    /// The best peer and its figure.
    pub fn best_peer(&self, results: &Results) -> Option<(Candidate, f64)> {
        let peers = Candidate::ALL.into_iter().filter(|candidate| candidate.is_peer());
        let figures = peers.filter_map(|peer| Some((peer, results.median(self.figure, peer, self.at)?)));
        figures.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// How much it may be, in the figure's unit, after what peers reached.
    pub fn most(&self, results: &Results) -> Option<f64> {
        match self.limit {
            Limit::AtMost(most) => Some(most),
            Limit::Of(peer, part) => Some(results.median(self.figure, peer, self.at)? * part),
        }
    }
}
