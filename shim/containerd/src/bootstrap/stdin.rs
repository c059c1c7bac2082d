//! containerd's input to `start` and `-info` on stdin.
//!
//! Up to 2.2 it is an `Any` with the runtime's options, or nothing at all; from 2.3 on `BootstrapParams`, which carries what
//! the flags and the environment carry, too. Nothing says which, and both begin with two strings; only the newer message has
//! more than that. Whatever cannot be read is passed over: a `start` that fails here would fail for every container.

use std::io::{self, Read};

use containerd_shim_protos::bootstrap_api::BootstrapParams;
use protobuf::{Message, well_known_types::any::Any};

use crate::options::Options;

/// More is no message of containerd's.
const LONGEST: u64 = 4 * 1024 * 1024;

/// The content of stdin.
#[derive(Debug, Default)]
pub(super) struct Sent {
    /// The runtime's options; defaults where none could be read.
    pub(super) options: Options,
    /// The message the options came in, to be handed back by `-info`.
    pub(super) any: Option<Any>,
    /// containerd's event socket, sent by 2.3 and later.
    pub(super) ttrpc_address: String,
}

impl Sent {
    /// Reads stdin to its end.
    pub(super) fn read() -> Self {
        let mut bytes = Vec::new();
        if let Err(error) = io::stdin().lock().take(LONGEST).read_to_end(&mut bytes) {
            tracing::debug!(%error, "nothing to read on stdin");
        }
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Self {
        if bytes.is_empty() {
            return Self::default();
        }
        match BootstrapParams::parse_from_bytes(bytes) {
            Ok(params) if is_bootstrap(&params) => Self::from_bootstrap(params),
            _ => Self::from_any(Any::parse_from_bytes(bytes).ok()),
        }
    }

    fn from_bootstrap(params: BootstrapParams) -> Self {
        let mut values = params.extensions.into_iter().filter_map(|extension| extension.value.into_option());
        let options = values.find(|any| any.type_url.ends_with(".Options"));
        Self { ttrpc_address: params.containerd_ttrpc_address, ..Self::from_any(options) }
    }

    fn from_any(any: Option<Any>) -> Self {
        let options = Options::from_any(any.as_ref()).unwrap_or_else(|error| {
            tracing::debug!(%error, "options that cannot be read here; `create` will say so");
            Options::default()
        });
        Self { options, any, ttrpc_address: String::new() }
    }
}

fn is_bootstrap(params: &BootstrapParams) -> bool {
    !params.containerd_ttrpc_address.is_empty()
        || !params.containerd_grpc_address.is_empty()
        || !params.containerd_version.is_empty()
        || !params.extensions.is_empty()
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::{bootstrap_api::Extension, shim::oci};
    use protobuf::MessageField;

    use super::*;

    fn options() -> Any {
        let options = oci::Options { shim_cgroup: "/shims".into(), ..Default::default() };
        Any {
            type_url: "containerd.runc.v1.Options".into(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        }
    }

    #[test]
    fn options_of_a_containerd_before_2_3() {
        let sent = Sent::parse(&options().write_to_bytes().unwrap());
        assert_eq!(sent.options.shim_cgroup, "/shims");
    }

    #[test]
    fn bootstrap_params_since_2_3() {
        let params = BootstrapParams {
            instance_id: "abc".into(),
            namespace: "k8s.io".into(),
            containerd_ttrpc_address: "/run/t.sock".into(),
            extensions: vec![Extension { value: MessageField::some(options()), ..Default::default() }],
            ..Default::default()
        };
        let sent = Sent::parse(&params.write_to_bytes().unwrap());
        assert_eq!(sent.options.shim_cgroup, "/shims");
        assert_eq!(sent.ttrpc_address, "/run/t.sock");
    }

    #[test]
    fn nothing_and_nonsense_are_defaults() {
        for bytes in [&b""[..], b"\xff\xff\xff", b"{\"json\":1}"] {
            assert_eq!(Sent::parse(bytes).options, Options::default());
        }
    }
}
