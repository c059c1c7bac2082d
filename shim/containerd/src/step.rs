//! The error of a failed action, for callers that do not distinguish failures.

use std::error::Error;

/// An action on an object that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct StepError {
    step: String,
    source: Box<dyn Error + Send + Sync>,
}

/// Names the failed action and its object.
pub fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    step: impl Into<String>,
) -> impl FnOnce(E) -> StepError {
    let step = step.into();
    move |source| StepError {
        step,
        source: source.into(),
    }
}
