//! The extent of a test: small in `make test`, large in `make soak`, which sets `BINDGUARD_SOAK`.

/// The number of rounds of a test.
pub fn rounds<N>(in_test: N, in_soak: N) -> N {
    match std::env::var_os("BINDGUARD_SOAK") {
        Some(_) => in_soak,
        None => in_test,
    }
}
