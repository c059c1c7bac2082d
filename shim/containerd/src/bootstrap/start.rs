//! `start`: the address of the server that takes the container.
//!
//! containerd's input to `start` and `-info` on stdin.
//!
//! Up to containerd 2.2 the input is an `Any` with the runtime's options, or nothing. Since 2.3
//! `start` gets `BootstrapParams`, which also repeat the flags and the environment, and name the
//! folder for sockets. Both messages begin with two strings, so an `Any` also parses as
//! `BootstrapParams`, and vice versa. Only `BootstrapParams` repeat the flags `-id` and
//! `-namespace`, and only an `Any` names a type of options. Other input is refused, as by Go's shim
//! of containerd 2.4: an answer in the wrong form would leak a server.

use std::error::Error;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bindguard_core::error_chain;
use bindguard_core::handover::VERSION_FILE;
use bindguard_sys::leave_room;
use containerd_shim_protos::TASK_API_VERSION;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, LogLevel};
use protobuf::Enum as _;
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use rustix::process::{getpid, getppid};
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use super::claim::{Claim, claim};
use super::{ADDRESS_FILE, SOCKET_DIRECTORY, link_of_group, takes};
use crate::args::Args;
use crate::bundle::{Bundle, Options, OptionsError, ShimSpec, given_or, write_beside};
use crate::cgroup::{ROOT, with_controllers};
use crate::work::{Result, StepError, block_on, failed};
use crate::{kernel, logging};

/// The annotations that name the group of containers that share a server, those of a pod. Searched
/// in this order; the second is the CRI plugin's.
const GROUP_ANNOTATIONS: [&str; 2] = [
    "io.containerd.runc.v2.group",
    "io.kubernetes.cri.sandbox-id",
];

/// The highest `oom_score_adj` of the kernel.
const HIGHEST_OOM_SCORE: i32 = 1000;

/// Answers with the address of the group's server, and starts a server if there is none. Runs in
/// the bundle's directory.
pub fn start(args: &Args) -> Result<(), Box<dyn Error>> {
    // Without the fifo the log of `start` is lost; that is no reason to fail.
    let _ = logging::to_fifo(Path::new(logging::FIFO), args.debug, false);
    let sent = StartInput::parse(&read_limited(io::stdin().lock())?, args)?;
    let spec = Bundle::at(".").spec()?;
    let mut directory = Path::new(SOCKET_DIRECTORY);
    if let Some(params) = &sent.bootstrap
        && !params.socket_dir().is_empty()
    {
        directory = Path::new(params.socket_dir());
    }
    let group = group_of(&spec, &args.id);
    let link = link_of_group(directory, &args.address, &args.namespace, &group);
    let claimed = claim(&link, |server| block_on(takes(server, &args.id)));
    let claimed = claimed.map_err(failed("bind the shim's socket"))?;
    let socket = match claimed {
        Claim::Serving(socket) => socket,
        Claim::New(own) => {
            start_server(args, &sent, &own.listener)?;
            own.hand_over()
        }
    };
    let address = format!("unix://{}", socket.display());
    // Every bundle gets the address, also if the container joins a server: containerd 1.x reads the
    // file after a restart.
    write_beside(Path::new(ADDRESS_FILE), address.as_bytes())
        .map_err(failed("write the address into the bundle"))?;
    let answer = encode_answer(&address, sent.bootstrap.is_some());
    let answer = answer.map_err(failed("encode the answer"))?;
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(&answer).and_then(|()| stdout.flush());
    Ok(written.map_err(failed("answer with the address"))?)
}

/// The group that an annotation names; a container without an annotation is a group of its own.
fn group_of(spec: &ShimSpec, id: &str) -> String {
    for name in GROUP_ANNOTATIONS {
        if let Some(group) = spec.annotations.get(name) {
            return given_or(group, id).to_owned();
        }
    }
    id.to_owned()
}

fn start_server(args: &Args, sent: &StartInput, listener: &UnixListener) -> Result<()> {
    // This process and the server get a separate core scheduling group, if containerd wants that.
    if std::env::var_os("SCHED_CORE").is_some_and(|wanted| !wanted.is_empty())
        && let Err(error) =
            create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ProcessGroup)
    {
        log::warn!(error:%; "no core scheduling for the shim");
    }
    // The link, not its target: after an upgrade, too, bindguard-runtime is searched beside it.
    let program = std::env::current_exe().map_err(failed("find this program"))?;
    let socket = listener
        .try_clone()
        .map_err(failed("pass on the shim's socket"))?;
    let (name, value) = kernel::memory_settings();
    let mut command = Command::new(program);
    command
        .args(["-namespace", &args.namespace])
        .args(["-id", &args.id])
        .args(["-address", &args.address])
        .env(name, value)
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A signal to containerd's process group does not reach it.
        .process_group(0);
    let mut debug = args.debug;
    if let Some(params) = &sent.bootstrap {
        debug |= params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG.value();
        if !params.containerd_ttrpc_address.is_empty() {
            command.env("TTRPC_ADDRESS", &params.containerd_ttrpc_address);
        }
    }
    if debug {
        command.arg("-debug");
    }
    let server = command.spawn().map_err(failed("start the server"))?.id();
    // An upgrade replaces the program's file, and the server runs on: `bindguard status` reads the
    // version. Both files are worth less than a create, which may need the room.
    if File::open(".").is_ok_and(|bundle| leave_room(&bundle).is_ok()) {
        for (name, text) in [
            ("shim.pid", &*server.to_string()),
            (VERSION_FILE, env!("CARGO_PKG_VERSION")),
        ] {
            let _ = write_beside(Path::new(name), text.as_bytes());
        }
    }
    join_cgroup(server, &sent.options.shim_cgroup);
    adjust_oom_score(server);
    Ok(())
}

/// The answer to `start`, in a form that the calling containerd understands.
///
/// | containerd | sends | understands | what follows for a pod |
/// |---|---|---|---|
/// | 1.6, 1.7 | an `Any` or nothing | the plain address | `start` and `delete` for each container |
/// | 2.0 to 2.2 | an `Any` or nothing | the plain address, JSON | with the address, version 2: the same |
/// | 2.3 and later | `BootstrapParams` | also a `BootstrapResult` | with version 3: `start` and `delete` for the sandbox alone |
fn encode_answer(address: &str, is_bootstrap: bool) -> protobuf::Result<Vec<u8>> {
    if !is_bootstrap {
        return Ok(address.as_bytes().to_owned());
    }
    let result = BootstrapResult {
        version: TASK_API_VERSION,
        address: address.to_owned(),
        protocol: "ttrpc".to_owned(),
        ..Default::default()
    };
    result.write_to_bytes()
}

// The server's placement among the node's processes: core scheduling, out-of-memory order, cgroup.
// Failures are logged only: a node without these features must still run containers.

/// Lets the kernel kill the shim rather than containerd: the score is the parent's, containerd's,
/// plus 1.
fn adjust_oom_score(server: u32) {
    let parent = match getppid() {
        Some(pid) => pid.as_raw_nonzero().to_string(),
        None => "self".to_owned(),
    };
    let adjust = || -> io::Result<()> {
        let score = fs::read_to_string(format!("/proc/{parent}/oom_score_adj"))?;
        let score: i32 = score.trim().parse().map_err(io::Error::other)?;
        let score = (score + 1).min(HIGHEST_OOM_SCORE);
        fs::write(format!("/proc/{server}/oom_score_adj"), score.to_string())
    };
    if let Err(error) = adjust() {
        log::debug!(error:%; "the shim's oom_score_adj stays as it is");
    }
}

/// Moves the server into the cgroup that the options name: in every v1 hierarchy, or in the v2
/// hierarchy. The unified hierarchy of a hybrid node gets no cgroup.
fn join_cgroup(server: u32, cgroup: &str) {
    if cgroup.is_empty() {
        return;
    }
    let cgroup = Path::new(cgroup.trim_start_matches('/'));
    for hierarchy in with_controllers(Path::new(ROOT)) {
        let directory = hierarchy.join(cgroup);
        let joined = make_cgroup(&hierarchy, cgroup)
            .and_then(|()| fs::write(directory.join("cgroup.procs"), server.to_string()));
        if let Err(error) = joined {
            log::warn!(error:%, cgroup:% = directory.display(); "the shim stays out of a cgroup");
        }
    }
}

/// A cpuset of v1 begins without a CPU and accepts no process until it has some: it gets its
/// parent's. In v2 an empty cpuset uses its parent's, and the topmost has no such file.
fn make_cgroup(hierarchy: &Path, cgroup: &Path) -> io::Result<()> {
    let mut directory = hierarchy.to_owned();
    for name in cgroup.components() {
        let parent = directory.clone();
        directory.push(name);
        match DirBuilder::new().mode(0o755).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if fs::read_to_string(directory.join(file)).is_ok_and(|own| own.trim().is_empty())
                && let Ok(of_parent) = fs::read_to_string(parent.join(file))
            {
                fs::write(directory.join(file), of_parent)?;
            }
        }
    }
    Ok(())
}

/// The limit of Go's shim.
const MAX_INPUT_BYTES: usize = 10 * 1024 * 1024;
/// A socket's path has at most 107 bytes, see unix(7), including a slash and the 64 digits of a
/// name.
const MAX_DIRECTORY_BYTES: usize = 107 - 1 - 64;

#[derive(Default)]
struct StartInput {
    /// The runtime's options; defaults where none could be read.
    options: Options,
    /// Only 2.3 and later send them. Such a containerd also understands a `BootstrapResult`.
    bootstrap: Option<BootstrapParams>,
}

impl StartInput {
    fn parse(bytes: &[u8], args: &Args) -> Result<Self> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let params = BootstrapParams::parse_from_bytes(bytes);
        if let Ok(params) = &params
            && (&params.instance_id, &params.namespace) == (&args.id, &args.namespace)
        {
            let directory = params.socket_dir();
            let is_usable = directory.starts_with('/') && directory.len() <= MAX_DIRECTORY_BYTES;
            if !directory.is_empty() && !is_usable {
                return Err(format!(
                    "socket_dir {directory:?}: not an absolute path of at most \
                     {MAX_DIRECTORY_BYTES} bytes"
                )
                .into());
            }
            let extensions = params.extensions.iter();
            let mut values = extensions.filter_map(|extension| extension.value.as_ref());
            return Ok(Self {
                options: start_options(values.find(|any| has_options(any)))?,
                bootstrap: Some(params.clone()),
            });
        }
        match (Any::parse_from_bytes(bytes), params) {
            (Ok(any), _) if has_options(&any) => Ok(Self {
                options: start_options(Some(&any))?,
                bootstrap: None,
            }),
            (_, Ok(params)) => Err(format!(
                "bootstrap parameters do not match the command line: \
                 id {:?} in namespace {:?}, not {} in {}",
                params.instance_id, params.namespace, args.id, args.namespace
            )
            .into()),
            (_, Err(_)) => Err(unknown_input()),
        }
    }
}

/// The input of `-info`: an `Any` with the runtime's options, or nothing.
pub fn read_options() -> Result<(Options, Option<Any>)> {
    let bytes = read_limited(io::stdin().lock())?;
    if bytes.is_empty() {
        return Ok((Options::default(), None));
    }
    let any = Any::parse_from_bytes(&bytes).map_err(|_| unknown_input())?;
    Ok((Options::from_any(Some(&any))?, Some(any)))
}

fn unknown_input() -> StepError {
    "read stdin: neither bootstrap parameters nor runtime options"
        .to_owned()
        .into()
}

fn read_limited(stdin: impl Read) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stdin
        .take(MAX_INPUT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(failed("read stdin"))?;
    if bytes.len() > MAX_INPUT_BYTES {
        Err(format!("read stdin: more than {MAX_INPUT_BYTES} bytes").into())
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
fn start_options(any: Option<&Any>) -> Result<Options> {
    match Options::from_any(any) {
        Err(OptionsError::Malformed(error)) => Err(error),
        Err(error) => {
            log::debug!(error:% = error_chain(&error); "options that `create` will refuse");
            Ok(Options::default())
        }
        Ok(options) => Ok(options),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn an_older_containerd_gets_the_address_alone() {
        assert_eq!(encode_answer("unix:///s/a", false).unwrap(), b"unix:///s/a");
        // A newer containerd that parses it first as a BootstrapResult must fail.
        assert!(BootstrapResult::parse_from_bytes(b"unix:///s/a").is_err());
    }

    /// The bytes that Go's protobuf encodes for version 3, this address and "ttrpc".
    #[test]
    fn one_that_sent_parameters_gets_a_result() {
        let expected = b"\x08\x03\x12\x0bunix:///s/a\x1a\x05ttrpc";
        assert_eq!(encode_answer("unix:///s/a", true).unwrap(), expected);
    }

    fn group(annotations: &str) -> String {
        let spec =
            ShimSpec::parse(format!(r#"{{"annotations":{annotations}}}"#).as_bytes()).unwrap();
        group_of(&spec, "self")
    }

    #[test]
    fn the_runc_annotation_goes_before_the_pods() {
        assert_eq!(group("{}"), "self");
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":"pod"}"#), "pod");
        assert_eq!(
            group(r#"{"io.kubernetes.cri.sandbox-id":"pod","io.containerd.runc.v2.group":"g"}"#),
            "g"
        );
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":""}"#), "self");
    }
}

#[cfg(test)]
mod stdin_tests {
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

    fn sent(params: &BootstrapParams) -> Result<StartInput> {
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
        let params = sent.bootstrap.unwrap();
        assert_eq!(params.containerd_ttrpc_address, "/run/t.sock");
        assert_eq!(params.socket_dir(), "/run/s");
        assert_eq!(params.log_level, LogLevel::LOG_LEVEL_TRACE.into());
    }

    /// containerd may send nothing beyond the flags.
    #[test]
    fn bare_params_are_params() {
        assert_eq!(sent(&params()).unwrap().bootstrap, Some(params()));
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
            let error = sent(&other).err().unwrap().to_string();
            assert!(
                error.starts_with("bootstrap parameters do not match the command line: id "),
                "{error}"
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
        assert_eq!(
            sent(&relative).err().unwrap().to_string(),
            "socket_dir \"s\": not an absolute path of at most 42 bytes"
        );
    }

    #[test]
    fn nothing_is_a_default_and_nonsense_is_refused() {
        let nothing = StartInput::parse(b"", &args()).unwrap();
        assert_eq!(
            (nothing.options, nothing.bootstrap),
            (Options::default(), None)
        );
        for bytes in [&b"\xff\xff\xff"[..], b"{\"json\":1}"] {
            assert_eq!(
                StartInput::parse(bytes, &args()).err().unwrap().to_string(),
                "read stdin: neither bootstrap parameters nor runtime options"
            );
        }
        let malformed = Any {
            value: vec![0xff],
            ..options()
        };
        let of_older = StartInput::parse(&malformed.write_to_bytes().unwrap(), &args());
        let is_options = |read: Result<_>| {
            read.err().unwrap().to_string() == "decode options of type containerd.runc.v1.Options"
        };
        assert!(is_options(of_older));
        let extensions = vec![Extension {
            value: MessageField::some(malformed),
            ..Default::default()
        }];
        assert!(is_options(sent(&BootstrapParams {
            extensions,
            ..params()
        })));
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
