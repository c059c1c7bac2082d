//! The answer to `start`, in a form that the calling containerd understands.
//!
//! | containerd | sends | understands | what follows for a pod |
//! |---|---|---|---|
//! | 1.6, 1.7 | an `Any` or nothing | the plain address | `start` and `delete` for each container |
//! | 2.0 to 2.2 | an `Any` or nothing | the plain address, JSON | with the address, version 2: the same |
//! | 2.3 and later | `BootstrapParams` | also a `BootstrapResult` | with version 3: `start` and `delete` for the sandbox alone |

use containerd_shim_protos::TASK_API_VERSION;
use containerd_shim_protos::bootstrap_api::BootstrapResult;
use protobuf::Message;

use super::stdin::Bootstrap;

/// The bytes for stdout.
pub(super) fn encode(address: &str, bootstrap: Option<&Bootstrap>) -> protobuf::Result<Vec<u8>> {
    match bootstrap {
        None => Ok(address.as_bytes().to_owned()),
        Some(_) => {
            let (address, protocol) = (address.to_owned(), "ttrpc".to_owned());
            BootstrapResult {
                version: TASK_API_VERSION,
                address,
                protocol,
                ..Default::default()
            }
            .write_to_bytes()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn an_older_containerd_gets_the_address_alone() {
        assert_eq!(encode("unix:///s/a", None).unwrap(), b"unix:///s/a");
        // A newer containerd that parses it first as a BootstrapResult must fail.
        assert!(BootstrapResult::parse_from_bytes(b"unix:///s/a").is_err());
    }

    /// The bytes that Go's protobuf encodes for version 3, this address and "ttrpc".
    #[test]
    fn one_that_sent_parameters_gets_a_result() {
        let expected = b"\x08\x03\x12\x0bunix:///s/a\x1a\x05ttrpc";
        assert_eq!(
            encode("unix:///s/a", Some(&Bootstrap::default())).unwrap(),
            expected
        );
    }
}
