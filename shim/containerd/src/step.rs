//! The error of a verb of the command line, which `main` prints.

use std::error::Error;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub(crate) struct StepError {
    step: &'static str,
    source: Box<dyn Error + Send + Sync>,
}

/// Names the failed step.
pub(crate) fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    step: &'static str,
) -> impl Fn(E) -> StepError {
    move |source| StepError {
        step,
        source: source.into(),
    }
}
