//! Checks that a file server answers.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// Checks that the server of a path answers, even with ENOENT: no command may hang on a silent
/// server.
///
/// # Errors
/// If the server is silent; the message has one line.
pub fn check_answers(path: &Path) -> anyhow::Result<()> {
    const READ_TIMEOUT: Duration = Duration::from_millis(700);
    match probe_side_by_side(&[path.to_owned()], READ_TIMEOUT).as_deref() {
        Ok([Answer::Silent(patience)]) => {
            bail!(
                "{} did not answer within {} ms",
                path.display(),
                patience.as_millis()
            )
        }
        _ => Ok(()),
    }
}
