//! One point of a node's check-up.

use serde::Serialize;

/// The result of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// No problem found.
    Good,
    /// A problem found.
    Bad,
    /// The check was not possible.
    NoAnswer,
}

/// A point and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Its name: stable, for programs.
    pub name: &'static str,
    /// Its result.
    pub state: State,
    /// The finding, as text.
    pub told: String,
    /// The command to run next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

impl Point {
    /// A point without a problem.
    pub fn good(name: &'static str, told: impl Into<String>) -> Self {
        Self { name, state: State::Good, told: told.into(), run: None }
    }

    /// A point with a problem, and the command that helps.
    pub fn bad(name: &'static str, told: impl Into<String>, run: impl Into<String>) -> Self {
        Self { name, state: State::Bad, told: told.into(), run: Some(run.into()) }
    }

    /// A point that could not be checked.
    pub fn no_answer(name: &'static str, why: impl Into<String>) -> Self {
        Self { name, state: State::NoAnswer, told: why.into(), run: None }
    }
}

/// All points. Its JSON form is what `doctor --json` prints.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DoctorReport {
    /// The points, in the order in which an operator would check them.
    pub points: Vec<Point>,
}

impl DoctorReport {
    /// True if some point has this state.
    pub fn has(&self, state: State) -> bool {
        self.points.iter().any(|point| point.state == state)
    }
}
