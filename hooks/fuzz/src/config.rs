//! Any text is a config or an error of one line that can be shown.

use bindguard_config::Config;

/// Panics when that is not so.
pub fn check(text: &str) {
    match Config::from_toml(text) {
        Ok(config) => {
            let _ = (
                config.deadline(),
                config.runtime(),
                config.journal(),
                config.policy(),
            );
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
