//! One point of a node's check-up.

use serde::Serialize;

/// How a point stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// As it should be.
    Good,
    /// Not as it should be.
    Bad,
    /// It could not be told.
    NoAnswer,
}

/// A point, and what was found of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Its name: stable, for programs.
    pub name: &'static str,
    /// How it stands.
    pub state: State,
    /// What was found.
    pub told: String,
    /// What to run about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

impl Point {
    /// A point that is as it should be.
    pub fn good(name: &'static str, told: impl Into<String>) -> Self {
        Self { name, state: State::Good, told: told.into(), run: None }
    }

    /// A point that is not, and the command that helps.
    pub fn bad(name: &'static str, told: impl Into<String>, run: impl Into<String>) -> Self {
        Self { name, state: State::Bad, told: told.into(), run: Some(run.into()) }
    }

    /// A point that could not be told.
    pub fn no_answer(name: &'static str, why: impl Into<String>) -> Self {
        Self { name, state: State::NoAnswer, told: why.into(), run: None }
    }
}

/// All points. Its JSON form is what `doctor --json` prints.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DoctorReport {
    /// The points, in the order in which somebody would look.
    pub points: Vec<Point>,
}

impl DoctorReport {
    /// Whether some point stands so.
    pub fn has(&self, state: State) -> bool {
        self.points.iter().any(|point| point.state == state)
    }
}
