//! `bindguard_fuzz::config` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &str| bindguard_fuzz::config::check(input));
