//! `bindguard_fuzz::statmount` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bindguard_fuzz::statmount::check(input));
