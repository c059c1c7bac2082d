//! `bindguard_fuzz::kubelet_paths` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bindguard_fuzz::kubelet_paths::check(input));
