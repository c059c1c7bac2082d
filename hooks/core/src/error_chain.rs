//! Prints an error with its causes in a single line.

use std::error::Error;

/// Example: `bind a over b: device or resource busy`. An error's text names the action and its
/// object; the error's source is the cause.
pub fn error_chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        // Some libraries repeat the source in their own text.
        if !line.contains(&why) {
            line.push_str(": ");
            line.push_str(&why);
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("bind a over b")]
        Bind(#[source] std::io::Error),
        #[error("bind a over b: busy")]
        RepeatsItsCause(#[source] std::io::Error),
    }

    #[test]
    fn each_cause_follows_once() {
        let busy = || std::io::Error::other("busy");
        for error in [Failed::Bind(busy()), Failed::RepeatsItsCause(busy())] {
            assert_eq!(error_chain(&error), "bind a over b: busy");
        }
    }
}
