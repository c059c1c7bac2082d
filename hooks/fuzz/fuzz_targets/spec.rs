//! `bindguard_fuzz::spec` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bindguard_fuzz::spec::check(input));
