//! Formats an error with its causes in one line.

use std::error::Error;

/// `open stdin "/x": No such file or directory (os error 2)`: each error names the action and object, its source the cause.
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        // Some libraries repeat the source in their own text.
        if !text.contains(&why) {
            text.push_str(": ");
            text.push_str(&why);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_follows_the_deed() {
        #[derive(Debug, thiserror::Error)]
        #[error("bind a over b")]
        struct Deed(#[source] std::io::Error);
        let error = Deed(std::io::Error::other("busy"));
        assert_eq!(with_causes(&error), "bind a over b: busy");
    }
}
