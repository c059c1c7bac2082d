//! An error in one line.

use std::error::Error;

/// An error with all its causes.
pub(crate) fn in_full(error: impl Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    line
}
