//! Any text is a config or an error of one line that can be shown.
#![no_main]

use bindguard_config::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match Config::from_toml(text) {
        Ok(config) => {
            let _ = (config.deadline(), config.runtime(), config.journal(), config.policy());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
