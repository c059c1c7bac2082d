//! The error of a failed action, for callers that do not distinguish failures.

use std::error::Error;

/// An action on an object that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct StepError {
    step: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

/// The result of an action on an object.
pub type Result<T, E = StepError> = std::result::Result<T, E>;

/// Names the failed action and its object.
pub fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    step: impl Into<String>,
) -> impl FnOnce(E) -> StepError {
    let step = step.into();
    move |source| StepError {
        step,
        source: Some(source.into()),
    }
}

/// A failure that has no other cause than what the text says.
impl From<String> for StepError {
    fn from(step: String) -> Self {
        Self { step, source: None }
    }
}
