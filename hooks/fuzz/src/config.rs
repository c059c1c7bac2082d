//! Any text is a config or an error with a message.

use bindguard_config::Config;

/// Panics if a text breaks this property.
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
