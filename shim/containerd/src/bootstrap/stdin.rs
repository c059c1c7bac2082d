//! containerd's input to `start` and `-info` on stdin.
//!
//! Up to 2.2 it is an `Any` with the runtime's options, or nothing. Since 2.3 `start` gets `BootstrapParams`, which also
//! repeats the flags and the environment, and has the folder for sockets. Both messages begin with two strings, and either
//! parses as the other. Only `BootstrapParams` repeats the flags `-id` and `-namespace`. Unreadable input is ignored: a `start`
//! that fails here would fail for every container.

use std::io::{self, Read};
use std::path::PathBuf;

use bindguard_core::error_chain;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, LogLevel};
use protobuf::well_known_types::any::Any;
use protobuf::{Enum as _, Message};

use crate::args::Args;
use crate::options::Options;

/// containerd sends no longer message.
const LONGEST: u64 = 4 * 1024 * 1024;
/// A socket's path has at most 107 bytes, see unix(7), including a slash and the 64 digits of a name.
const LONGEST_DIRECTORY: usize = 107 - 1 - 64;

/// The content of stdin.
#[derive(Debug, Default)]
pub(super) struct CallerInput {
    /// The runtime's options; defaults where none could be read.
    pub(super) options: Options,
    /// The message with the options, which `-info` returns.
    pub(super) any: Option<Any>,
    /// The fields that only 2.3 and later send.
    pub(super) bootstrap: Option<Bootstrap>,
}

/// The rest of `BootstrapParams`. A containerd that sends it also understands a `BootstrapResult`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Bootstrap {
    /// containerd's event socket; may be empty.
    pub(super) ttrpc_address: String,
    /// The directory for shims' sockets from containerd's config.
    pub(super) socket_directory: Option<PathBuf>,
    /// Log more.
    pub(super) debug: bool,
}

impl CallerInput {
    /// Reads stdin to its end.
    pub(super) fn read(args: &Args) -> Self {
        let mut bytes = Vec::new();
        if let Err(error) = io::stdin().lock().take(LONGEST).read_to_end(&mut bytes) {
            tracing::debug!(%error, "nothing to read on stdin");
        }
        Self::parse(&bytes, args)
    }

    fn parse(bytes: &[u8], args: &Args) -> Self {
        if bytes.is_empty() {
            return Self::default();
        }
        match BootstrapParams::parse_from_bytes(bytes) {
            Ok(params) if is_bootstrap(&params, args) => Self::from_bootstrap(params),
            _ => Self::from_any(Any::parse_from_bytes(bytes).ok()),
        }
    }

    fn from_bootstrap(params: BootstrapParams) -> Self {
        let bootstrap = Bootstrap {
            debug: params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG.value(),
            socket_directory: params.socket_dir.filter(|directory| !directory.is_empty()).and_then(usable),
            ttrpc_address: params.containerd_ttrpc_address,
        };
        let mut values = params.extensions.into_iter().filter_map(|extension| extension.value.into_option());
        let options = values.find(|any| any.type_url.ends_with(".Options"));
        Self { bootstrap: Some(bootstrap), ..Self::from_any(options) }
    }

    fn from_any(any: Option<Any>) -> Self {
        let options = Options::from_any(any.as_ref()).unwrap_or_else(|error| {
            tracing::debug!(error = error_chain(&error), "options that cannot be read here; `create` will say so");
            Options::default()
        });
        Self { options, any, bootstrap: None }
    }
}

fn is_bootstrap(params: &BootstrapParams, args: &Args) -> bool {
    !args.id.is_empty() && (&params.instance_id, &params.namespace) == (&args.id, &args.namespace)
}

fn usable(directory: String) -> Option<PathBuf> {
    let is_usable = directory.starts_with('/') && directory.len() <= LONGEST_DIRECTORY;
    if !is_usable {
        tracing::warn!(directory, "the configured folder for sockets is not used: its path is relative or too long");
    }
    is_usable.then(|| directory.into())
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::bootstrap_api::Extension;
    use containerd_shim_protos::shim::oci;
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

    fn args() -> Args {
        Args::parse("-namespace k8s.io -id abc start".split(' ').map(str::to_owned)).unwrap()
    }

    fn params() -> BootstrapParams {
        BootstrapParams { instance_id: "abc".into(), namespace: "k8s.io".into(), ..Default::default() }
    }

    fn sent(params: &BootstrapParams) -> CallerInput {
        CallerInput::parse(&params.write_to_bytes().unwrap(), &args())
    }

    #[test]
    fn options_of_a_containerd_before_2_3() {
        let sent = CallerInput::parse(&options().write_to_bytes().unwrap(), &args());
        assert_eq!((sent.options.shim_cgroup.as_str(), sent.bootstrap), ("/shims", None));
    }

    #[test]
    fn bootstrap_params_since_2_3() {
        let sent = sent(&BootstrapParams {
            containerd_ttrpc_address: "/run/t.sock".into(),
            extensions: vec![Extension { value: MessageField::some(options()), ..Default::default() }],
            socket_dir: Some("/run/s".into()),
            log_level: LogLevel::LOG_LEVEL_TRACE.into(),
            ..params()
        });
        assert_eq!(sent.options.shim_cgroup, "/shims");
        let (ttrpc_address, socket_directory) = ("/run/t.sock".into(), Some("/run/s".into()));
        assert_eq!(sent.bootstrap, Some(Bootstrap { ttrpc_address, socket_directory, debug: true }));
    }

    /// containerd may send nothing beyond the flags.
    #[test]
    fn bare_params_are_params_and_those_of_another_container_are_not() {
        assert_eq!(sent(&params()).bootstrap, Some(Bootstrap::default()));
        assert_eq!(sent(&BootstrapParams { namespace: "moby".into(), ..params() }).bootstrap, None);
    }

    #[test]
    fn a_folder_in_which_no_socket_can_be_bound_is_not_used() {
        for (directory, expected) in
            [(42, true), (43, false)].map(|(length, ok)| (format!("/{:a<1$}", "", length - 1), ok))
        {
            let sent = sent(&BootstrapParams { socket_dir: Some(directory), ..params() });
            assert_eq!(sent.bootstrap.unwrap().socket_directory.is_some(), expected);
        }
        let relative = BootstrapParams { socket_dir: Some("s".into()), ..params() };
        assert_eq!(sent(&relative).bootstrap.unwrap().socket_directory, None);
    }

    #[test]
    fn nothing_and_nonsense_are_defaults() {
        for bytes in [&b""[..], b"\xff\xff\xff", b"{\"json\":1}"] {
            let sent = CallerInput::parse(bytes, &args());
            assert_eq!((sent.options, sent.bootstrap), (Options::default(), None));
        }
    }
}
