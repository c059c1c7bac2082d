//! containerd's input to `start` and `-info` on stdin.
//!
//! Up to containerd 2.2 the input is an `Any` with the runtime's options, or nothing. Since 2.3
//! `start` gets `BootstrapParams`, which also repeat the flags and the environment, and name the
//! folder for sockets. Both messages begin with two strings, so an `Any` also parses as
//! `BootstrapParams`, and vice versa. Only `BootstrapParams` repeat the flags `-id` and
//! `-namespace`, and only an `Any` names a type of options. Other input is refused, as by Go's shim
//! of containerd 2.4: an answer in the wrong form would leak a server.

use std::io::{self, Read};
use std::path::PathBuf;

use bindguard_core::error_chain;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, LogLevel};
use protobuf::well_known_types::any::Any;
use protobuf::{Enum as _, Message};

use crate::args::Args;
use crate::options::{Options, OptionsError};

/// The limit of Go's shim.
const MAX_INPUT_BYTES: usize = 10 * 1024 * 1024;
/// A socket's path has at most 107 bytes, see unix(7), including a slash and the 64 digits of a
/// name.
const MAX_DIRECTORY_BYTES: usize = 107 - 1 - 64;

/// An input that is refused.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// Stdin could not be read.
    #[error("read stdin")]
    Read(#[from] io::Error),
    /// The input is longer than any message of containerd.
    #[error("read stdin: more than {MAX_INPUT_BYTES} bytes")]
    TooLong,
    /// The bytes are neither parameters nor options.
    #[error("read stdin: neither bootstrap parameters nor runtime options")]
    Unknown,
    /// The parameters belong to a different container, or the message is not containerd's.
    #[error(
        "bootstrap parameters do not match the command line: \
         id {id:?} in namespace {namespace:?}, not {} in {}", .args_id, .args_namespace
    )]
    Mismatch {
        /// The container of the parameters.
        id: String,
        namespace: String,
        /// The container of the command line.
        args_id: String,
        args_namespace: String,
    },
    /// No socket can be bound in the configured folder.
    #[error("socket_dir {0:?}: not an absolute path of at most {MAX_DIRECTORY_BYTES} bytes")]
    SocketDirectory(String),
    #[error(transparent)]
    Options(#[from] OptionsError),
}

#[derive(Debug, Default)]
pub struct StartInput {
    /// The runtime's options; defaults where none could be read.
    pub options: Options,
    /// The fields that only 2.3 and later send.
    pub bootstrap: Option<Bootstrap>,
}

/// The rest of `BootstrapParams`. A containerd that sends it also understands a `BootstrapResult`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Bootstrap {
    /// containerd's event socket; may be empty.
    pub ttrpc_address: String,
    /// The directory for shims' sockets from containerd's config.
    pub socket_directory: Option<PathBuf>,
    /// Log more.
    pub debug: bool,
}

impl StartInput {
    /// Reads stdin to its end.
    pub fn read(args: &Args) -> Result<Self, InputError> {
        Self::parse(&read_limited(io::stdin().lock())?, args)
    }

    fn parse(bytes: &[u8], args: &Args) -> Result<Self, InputError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let params = BootstrapParams::parse_from_bytes(bytes);
        if let Ok(params) = &params
            && (&params.instance_id, &params.namespace) == (&args.id, &args.namespace)
        {
            return Self::from_bootstrap(params);
        }
        match (Any::parse_from_bytes(bytes), params) {
            (Ok(any), _) if has_options(&any) => Ok(Self {
                options: start_options(Some(&any))?,
                bootstrap: None,
            }),
            (_, Ok(params)) => Err(InputError::Mismatch {
                id: params.instance_id,
                namespace: params.namespace,
                args_id: args.id.clone(),
                args_namespace: args.namespace.clone(),
            }),
            (_, Err(_)) => Err(InputError::Unknown),
        }
    }

    fn from_bootstrap(params: &BootstrapParams) -> Result<Self, InputError> {
        let bootstrap = Bootstrap {
            debug: params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG.value(),
            socket_directory: socket_directory(params.socket_dir())?,
            ttrpc_address: params.containerd_ttrpc_address.clone(),
        };
        let mut values = params
            .extensions
            .iter()
            .filter_map(|extension| extension.value.as_ref());
        let options = start_options(values.find(|any| has_options(any)))?;
        Ok(Self {
            options,
            bootstrap: Some(bootstrap),
        })
    }
}

/// The input of `-info`: an `Any` with the runtime's options, or nothing.
pub fn read_options() -> Result<(Options, Option<Any>), InputError> {
    let bytes = read_limited(io::stdin().lock())?;
    if bytes.is_empty() {
        return Ok((Options::default(), None));
    }
    let any = Any::parse_from_bytes(&bytes).map_err(|_| InputError::Unknown)?;
    Ok((Options::from_any(Some(&any))?, Some(any)))
}

fn read_limited(stdin: impl Read) -> Result<Vec<u8>, InputError> {
    let mut bytes = Vec::new();
    stdin
        .take(MAX_INPUT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() > MAX_INPUT_BYTES {
        Err(InputError::TooLong)
    } else {
        Ok(bytes)
    }
}

/// True for an `Any` from containerd. `BootstrapParams` of a different container have more fields,
/// or no such type.
fn has_options(any: &Any) -> bool {
    any.type_url.ends_with("Options") && any.special_fields.unknown_fields().iter().next().is_none()
}

/// `start` uses a single field of the options. Only `Create` refuses an unknown type, or a table
/// that cannot be read.
fn start_options(any: Option<&Any>) -> Result<Options, InputError> {
    match Options::from_any(any) {
        Err(error @ OptionsError::Malformed { .. }) => Err(error.into()),
        Err(error) => {
            tracing::debug!(
                error = error_chain(&error),
                "options that `create` will refuse"
            );
            Ok(Options::default())
        }
        Ok(options) => Ok(options),
    }
}

fn socket_directory(named: &str) -> Result<Option<PathBuf>, InputError> {
    match named {
        "" => Ok(None),
        _ if named.starts_with('/') && named.len() <= MAX_DIRECTORY_BYTES => Ok(Some(named.into())),
        _ => Err(InputError::SocketDirectory(named.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::bootstrap_api::Extension;
    use containerd_shim_protos::shim::oci;
    use protobuf::MessageField;

    use super::*;

    fn options() -> Any {
        let options = oci::Options {
            shim_cgroup: "/shims".into(),
            ..Default::default()
        };
        Any {
            type_url: "containerd.runc.v1.Options".into(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        }
    }

    fn args() -> Args {
        Args::parse(
            "-namespace k8s.io -id abc start"
                .split(' ')
                .map(str::to_owned),
        )
        .unwrap()
    }

    fn params() -> BootstrapParams {
        BootstrapParams {
            instance_id: "abc".into(),
            namespace: "k8s.io".into(),
            ..Default::default()
        }
    }

    fn sent(params: &BootstrapParams) -> Result<StartInput, InputError> {
        StartInput::parse(&params.write_to_bytes().unwrap(), &args())
    }

    #[test]
    fn options_of_a_containerd_before_2_3() {
        let sent = StartInput::parse(&options().write_to_bytes().unwrap(), &args()).unwrap();
        assert_eq!(
            (sent.options.shim_cgroup.as_str(), sent.bootstrap),
            ("/shims", None)
        );
    }

    #[test]
    fn bootstrap_params_since_2_3() {
        let sent = sent(&BootstrapParams {
            containerd_ttrpc_address: "/run/t.sock".into(),
            extensions: vec![Extension {
                value: MessageField::some(options()),
                ..Default::default()
            }],
            socket_dir: Some("/run/s".into()),
            log_level: LogLevel::LOG_LEVEL_TRACE.into(),
            ..params()
        })
        .unwrap();
        assert_eq!(sent.options.shim_cgroup, "/shims");
        let (ttrpc_address, socket_directory) = ("/run/t.sock".into(), Some("/run/s".into()));
        assert_eq!(
            sent.bootstrap,
            Some(Bootstrap {
                ttrpc_address,
                socket_directory,
                debug: true
            })
        );
    }

    /// containerd may send nothing beyond the flags.
    #[test]
    fn bare_params_are_params() {
        assert_eq!(
            sent(&params()).unwrap().bootstrap,
            Some(Bootstrap::default())
        );
    }

    #[test]
    fn params_of_another_container_are_refused() {
        let version = "v2.4.0".to_owned();
        for other in [
            BootstrapParams {
                namespace: "moby".into(),
                ..params()
            },
            BootstrapParams {
                instance_id: "other".into(),
                ..params()
            },
            BootstrapParams {
                instance_id: "my.Options".into(),
                containerd_version: version,
                ..params()
            },
            BootstrapParams {
                containerd_binary: "/usr/bin/containerd".into(),
                ..Default::default()
            },
        ] {
            assert!(
                matches!(sent(&other), Err(InputError::Mismatch { .. })),
                "{other}"
            );
        }
    }

    #[test]
    fn a_folder_in_which_no_socket_can_be_bound_is_refused() {
        for (directory, is_usable) in
            [(42, true), (43, false)].map(|(length, ok)| (format!("/{:a<1$}", "", length - 1), ok))
        {
            let sent = sent(&BootstrapParams {
                socket_dir: Some(directory),
                ..params()
            });
            assert_eq!(sent.is_ok(), is_usable);
        }
        let relative = BootstrapParams {
            socket_dir: Some("s".into()),
            ..params()
        };
        assert!(matches!(
            sent(&relative),
            Err(InputError::SocketDirectory(_))
        ));
    }

    #[test]
    fn nothing_is_a_default_and_nonsense_is_refused() {
        let nothing = StartInput::parse(b"", &args()).unwrap();
        assert_eq!(
            (nothing.options, nothing.bootstrap),
            (Options::default(), None)
        );
        for bytes in [&b"\xff\xff\xff"[..], b"{\"json\":1}"] {
            assert!(matches!(
                StartInput::parse(bytes, &args()),
                Err(InputError::Unknown)
            ));
        }
        let malformed = Any {
            value: vec![0xff],
            ..options()
        };
        let of_older = StartInput::parse(&malformed.write_to_bytes().unwrap(), &args());
        assert!(matches!(of_older, Err(InputError::Options(_))));
        let extensions = vec![Extension {
            value: MessageField::some(malformed),
            ..Default::default()
        }];
        assert!(matches!(
            sent(&BootstrapParams {
                extensions,
                ..params()
            }),
            Err(InputError::Options(_))
        ));
    }

    #[test]
    fn the_limit_of_the_input() {
        for (length, is_read) in [(MAX_INPUT_BYTES, true), (MAX_INPUT_BYTES + 1, false)] {
            assert_eq!(
                read_limited(&vec![0; length][..]).is_ok(),
                is_read,
                "{length}"
            );
        }
    }
}
