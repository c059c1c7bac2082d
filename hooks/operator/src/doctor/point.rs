//! A point of a node's check-up.

use serde::Serialize;

/// The result of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PointStatus {
    /// No problem found.
    Ok,
    /// A problem found.
    Failed,
    /// The check was not possible.
    Unknown,
}

/// A point and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Its name: stable, for programs.
    pub name: &'static str,
    /// Its result.
    pub status: PointStatus,
    /// The finding, as text.
    pub message: String,
    /// The command to run next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Point {
    /// A point without a problem.
    pub fn ok(name: &'static str, message: impl Into<String>) -> Self {
        Self {
            name,
            status: PointStatus::Ok,
            message: message.into(),
            command: None,
        }
    }

    /// A point with a problem, and the command that helps.
    pub fn failed(
        name: &'static str,
        message: impl Into<String>,
        command: impl Into<String>,
    ) -> Self {
        Self {
            name,
            status: PointStatus::Failed,
            message: message.into(),
            command: Some(command.into()),
        }
    }

    /// A point that could not be checked.
    pub fn unknown(name: &'static str, why: impl Into<String>) -> Self {
        Self {
            name,
            status: PointStatus::Unknown,
            message: why.into(),
            command: None,
        }
    }
}

/// All points. `doctor --json` prints the JSON form.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DoctorReport {
    /// The points, in the order in which an operator would check them.
    pub points: Vec<Point>,
}

impl DoctorReport {
    /// True if a point has the status.
    pub fn has(&self, status: PointStatus) -> bool {
        self.points.iter().any(|point| point.status == status)
    }
}
