//! The error of an action whose failure no caller tells apart from others.

use std::error::Error;

/// An action on an object that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub(crate) struct StepError {
    step: String,
    source: Box<dyn Error + Send + Sync>,
}

/// Names the failed action and its object.
pub(crate) fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    step: impl Into<String>,
) -> impl FnOnce(E) -> StepError {
    let step = step.into();
    move |source| StepError {
        step,
        source: source.into(),
    }
}
