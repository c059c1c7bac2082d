//! The goal for each figure, and the check against it.

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

/// The goal for a figure of bindguard.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    pub figure: Figure,
    /// At which number of containers, pods or mounts; 0 where there is none.
    pub at: u64,
    pub limit: Limit,
}

/// The limit of a figure.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// In the figure's unit.
    AtMost(f64),
    /// So many times that of a peer or a floor.
    Of(Candidate, f64),
    /// This part of the best peer's.
    OfBestPeer(f64),
    /// At most this multiple of the figure's own value with this number of mounts.
    OfItselfAt(u64, f64),
}

/// The growth that counts as none, on machines that are never quite idle.
const FLAT: f64 = 1.25;

/// Everything that is wanted.
pub const GOALS: [Goal; 22] = [
    Goal {
        figure: Figure::PrivateDirty,
        at: 1,
        limit: Limit::AtMost(300.0),
    },
    Goal {
        figure: Figure::PrivateDirty,
        at: 5,
        limit: Limit::AtMost(450.0),
    },
    Goal {
        figure: Figure::Pss,
        at: 50,
        limit: Limit::Of(Candidate::Go21, 1.0 / 8.0),
    },
    Goal {
        figure: Figure::Threads,
        at: 0,
        limit: Limit::AtMost(1.0),
    },
    Goal {
        figure: Figure::WakeUps,
        at: 0,
        limit: Limit::AtMost(0.0),
    },
    Goal {
        figure: Figure::StartWall,
        at: 0,
        limit: Limit::AtMost(2.0),
    },
    Goal {
        figure: Figure::StartCommandCpu,
        at: 0,
        limit: Limit::AtMost(1.0),
    },
    Goal {
        figure: Figure::StartCpu,
        at: 0,
        limit: Limit::Of(Candidate::EmptyPrograms, 1.3),
    },
    Goal {
        figure: Figure::LifeCpu,
        at: 0,
        limit: Limit::Of(Candidate::Rust, 0.9),
    },
    Goal {
        figure: Figure::LifeAmongMounts,
        at: 10_000,
        limit: Limit::OfBestPeer(0.7),
    },
    Goal {
        figure: Figure::ShimAmongMounts,
        at: 10_000,
        limit: Limit::OfItselfAt(100, FLAT),
    },
    Goal {
        figure: Figure::WorkClean,
        at: 100,
        limit: Limit::AtMost(300.0),
    },
    Goal {
        figure: Figure::WorkClean,
        at: 30_000,
        limit: Limit::AtMost(300.0),
    },
    Goal {
        figure: Figure::GuardCpu,
        at: 100,
        limit: Limit::AtMost(1.5),
    },
    Goal {
        figure: Figure::GuardCpu,
        at: 30_000,
        limit: Limit::AtMost(1.5),
    },
    Goal {
        figure: Figure::GuardCpu,
        at: 10_000,
        limit: Limit::OfItselfAt(100, FLAT),
    },
    Goal {
        figure: Figure::RepairCpu,
        at: 1,
        limit: Limit::AtMost(3.0),
    },
    Goal {
        figure: Figure::RepairCpu,
        at: 5,
        limit: Limit::AtMost(3.0),
    },
    Goal {
        figure: Figure::ExecAboveBare,
        at: 0,
        limit: Limit::AtMost(1.5),
    },
    Goal {
        figure: Figure::BurstWall,
        at: 0,
        limit: Limit::OfBestPeer(0.9),
    },
    Goal {
        figure: Figure::BurstCpu,
        at: 0,
        limit: Limit::OfBestPeer(0.9),
    },
    Goal {
        figure: Figure::ShippedSize,
        at: 0,
        limit: Limit::AtMost(2.5),
    },
];

impl Goal {
    /// The value that bindguard reached.
    pub fn ours(&self, results: &Results) -> Option<f64> {
        results.median(self.figure, Candidate::Bindguard, self.at)
    }

    /// The best peer and its figure.
    pub fn best_peer(&self, results: &Results) -> Option<(Candidate, f64)> {
        let peers = Candidate::ALL
            .into_iter()
            .filter(|candidate| candidate.is_peer());
        let figures =
            peers.filter_map(|peer| Some((peer, results.median(self.figure, peer, self.at)?)));
        figures.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// The limit in the figure's unit, given the peers' values.
    pub fn most(&self, results: &Results) -> Option<f64> {
        match self.limit {
            Limit::AtMost(most) => Some(most),
            Limit::Of(peer, part) => Some(results.median(self.figure, peer, self.at)? * part),
            Limit::OfBestPeer(part) => Some(self.best_peer(results)?.1 * part),
            Limit::OfItselfAt(at, times) => Some(Self { at, ..*self }.ours(results)? * times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_no_peer_and_only_peers_set_a_goal() {
        let mut results = Results::default();
        let figures = [
            (Candidate::Runc, 10.0),
            (Candidate::Bindguard, 20.0),
            (Candidate::Go24, 40.0),
            (Candidate::Rust, 60.0),
        ];
        for (candidate, value) in figures {
            results.add(Figure::BurstWall, candidate, 0, value);
        }
        let goal = |limit| Goal {
            figure: Figure::BurstWall,
            at: 0,
            limit,
        };
        assert_eq!(
            goal(Limit::OfBestPeer(0.5)).best_peer(&results),
            Some((Candidate::Go24, 40.0))
        );
        assert_eq!(goal(Limit::OfBestPeer(0.5)).most(&results), Some(20.0));
        assert_eq!(
            goal(Limit::Of(Candidate::Rust, 0.5)).most(&results),
            Some(30.0)
        );
        assert_eq!(goal(Limit::OfItselfAt(0, 2.0)).most(&results), Some(40.0));
        assert_eq!(goal(Limit::Of(Candidate::Go21, 0.5)).most(&results), None);
    }
}
