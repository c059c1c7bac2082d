//! `bindguard_fuzz::mountinfo` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bindguard_fuzz::mountinfo::check(input));
