//! The server: from an inherited socket to its end.
//!
//! One thread, one event loop. The server ends when containerd requests the end (`Shutdown`) and no
//! containers are left, or after a long time without requests. SIGTERM requests the end, too, but
//! never ends a shim whose containers run: containerd would treat the end as a crash and kill the
//! containers. No other signal that can be caught ends the server.
//!
//! Go's ttrpc answers UNIMPLEMENTED for an unknown service, and containerd tries something else at
//! this code alone. The Rust one answers INVALID_ARGUMENT and has no hook for that. So ttrpc knows a
//! single method without a name, and each request arrives as the payload of a call of this method.
//! All other bytes pass unchanged.
//!
//! A frame is a header of ten bytes and a payload: ttrpc's PROTOCOL.md.

use std::collections::HashMap;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;
use std::{fs, io};

use futures_util::stream;
use nix::libc::{SIGINT, SIGTERM, SIGUSR1};
use protobuf::Message;
use rustix::fs::Mode;
use rustix::process::{getpid, set_child_subreaper, umask};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, duplex, join};
use tokio::net;
use ttrpc::asynchronous::transport::Listener;
use ttrpc::asynchronous::{Server, Service};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST};
use ttrpc::{MessageHeader, Request};

use crate::args::Args;
use crate::bootstrap::{events_address, remove_socket};
use crate::events::TaskEvents;
use crate::exits::{Exits, children_of, reap_on_sigchld};
use crate::kernel::{self, Signals};
use crate::logging;
use crate::service::{Containers, TaskService};
use crate::task::SharedState;
use crate::work::{Result, block_on, failed, read_each, run_blocking, spawn};

/// The time limit for the last events; Go's shim waits as long.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for sending the answer to `Shutdown`.
const GOODBYE_LIMIT: Duration = Duration::from_millis(200);
/// Each line of the log is a single write, which the fifo keeps whole up to 4 KiB.
const MAX_LINE: usize = 2048;
/// The interval at which a shim that got SIGTERM checks whether it may end.
const TERMINATE_POLL: Duration = Duration::from_millis(500);

/// Serves until containerd no longer needs this shim.
pub fn serve(args: &Args) -> Result<()> {
    kernel::remove_memory_settings();
    let listener = match args.socket.as_str() {
        "" => take_over_socket().map_err(failed("take over the socket from `start`"))?,
        path => bind_socket(path).map_err(failed("bind the socket of the command line"))?,
    };
    if let Err(error) = logging::to_fifo(Path::new(logging::FIFO), args.debug, true) {
        // Started by hand, or containerd is gone already. The containers matter more.
        eprintln!("no log fifo in this directory: {error}");
    }
    kernel::ignore_stray_signals();
    set_child_subreaper(Some(getpid())).map_err(failed("become the subreaper of containers"))?;
    block_on(run(args, listener)).map_err(failed("start the event loop"))?
}

/// `start` bound the socket and passes it as stdin: only stdin can be passed on and taken up
/// without `unsafe`. /dev/null replaces stdin at once.
fn take_over_socket() -> io::Result<UnixListener> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::stdio::dup2_stdin(fs::File::open("/dev/null")?)?;
    let listener = UnixListener::from(socket);
    // Fails if it is no socket.
    listener.local_addr()?;
    Ok(listener)
}

/// Only its own user may connect: a mode that is set after the bind would be late.
fn bind_socket(path: &str) -> io::Result<UnixListener> {
    let former = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(former);
    listener
}

async fn run(args: &Args, listener: UnixListener) -> Result<()> {
    let exits = Arc::new(Exits::default());
    spawn(reap_on_sigchld(Arc::clone(&exits)));
    let shared = SharedState {
        namespace: args.namespace.clone(),
        events: TaskEvents::publish_to(events_address(&args.address), args.namespace.clone()),
        exits,
    };
    let containers = Arc::new(Containers::new(shared.clone()));

    // The bundle in which the server started may be gone at the end.
    let address = listener.local_addr();
    let mut server = server(listener, &containers).map_err(failed("watch the socket"))?;
    server
        .start()
        .await
        .map_err(failed("serve the task service"))?;
    log::debug!(id:% = args.id; "serving");
    tokio::select! {
        () = containers.shutdown.notified() => {}
        () = terminated(&containers) => {}
        () = containers.deserted() => log::info!("ending: no container, and no client uses this shim"),
    }
    if let Ok(address) = &address
        && let Some(path) = address.as_pathname()
    {
        remove_socket(path, path);
    }
    server.stop_listen().await;
    shared.events.flush(FLUSH_LIMIT).await;
    let _ = tokio::time::timeout(GOODBYE_LIMIT, server.disconnect()).await;
    Ok(())
}

/// A server of the task service on this socket. ttrpc knows a single method without a name: it gets
/// each request whole, see [`pass_on`].
fn server(listener: UnixListener, containers: &Arc<Containers>) -> io::Result<Server> {
    let task_service = Box::new(TaskService(Arc::clone(containers)));
    let service = Service {
        methods: HashMap::from([(String::new(), task_service as _)]),
        streams: HashMap::new(),
    };
    let server = Server::new().add_listener(accept_from(listener)?);
    Ok(server.register_service(HashMap::from([(String::new(), service)])))
}

/// The largest number of bytes that wait for ttrpc. An idle connection keeps a buffer of the size
/// of its largest request, up to this number.
const MAX_WAITING: usize = 1024;

/// The connections of clients, with each request as a call of the method without a name.
fn accept_from(listener: UnixListener) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    let listener = net::UnixListener::from_std(listener)?;
    Ok(Listener::new(stream::poll_fn(move |context| {
        let accepted = ready!(listener.poll_accept(context));
        Poll::Ready(Some(accepted.map(|(socket, _)| {
            let (read, write) = socket.into_split();
            let (requests, server) = duplex(MAX_WAITING);
            spawn(async move { drop(pass_on(read, requests).await) });
            join(server, write)
        })))
    })))
}

/// Passes the frames of a connection to ttrpc until either end closes.
async fn pass_on(
    mut socket: impl AsyncRead + Unpin,
    mut server: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    loop {
        let mut bytes = [0; MESSAGE_HEADER_LENGTH];
        socket.read_exact(&mut bytes).await?;
        let mut header = MessageHeader::from(bytes);
        let length = header.length as usize;
        // ttrpc refuses a frame above its limit and reads the next frame.
        if header.type_ != MESSAGE_TYPE_REQUEST || length > MESSAGE_LENGTH_MAX {
            server.write_all(&bytes).await?;
            let mut rest = (&mut socket).take(length as u64);
            copy(&mut rest, &mut server).await?;
            continue;
        }
        let mut payload = vec![0; length];
        socket.read_exact(&mut payload).await?;
        // What cannot be parsed is ttrpc's to answer.
        if let Ok(Request { timeout_nano, .. }) = Request::parse_from_bytes(&payload) {
            let call = Request {
                payload,
                timeout_nano,
                ..Default::default()
            };
            payload = call.write_to_bytes()?;
            header.length = u32::try_from(payload.len()).map_err(io::Error::other)?;
        }
        let mut frame = Vec::from(header);
        frame.extend(payload);
        server.write_all(&frame).await?;
    }
}

/// Resolves after SIGTERM or SIGINT, when no container needs the shim. SIGUSR1 writes the shim's
/// state into the log.
async fn terminated(containers: &Containers) {
    let mut signals = match Signals::register(&[SIGTERM, SIGINT, SIGUSR1]) {
        Ok(signals) => signals,
        Err(error) => {
            log::error!(error:%; "SIGTERM, SIGINT and SIGUSR1 will be ignored");
            return std::future::pending().await;
        }
    };
    let mut is_to_end = false;
    while !(is_to_end && containers.close_if_idle()) {
        tokio::select! {
            woken = signals.next() => if woken.is_err() { return std::future::pending().await },
            () = tokio::time::sleep(TERMINATE_POLL), if is_to_end => {}
        }
        if signals.take(SIGUSR1) {
            dump(containers).await;
        }
        // Both flags are cleared.
        let is_requested = signals.take(SIGTERM) | signals.take(SIGINT);
        if is_requested && !is_to_end {
            log::info!("SIGTERM: ending as soon as no container runs");
            is_to_end = true;
        }
    }
}

/// Writes the state of the shim into its log on SIGUSR1, as Go's shim writes its stacks.
///
/// For a pod that hangs: the pending calls and their ages, the processes of the runtime, and the
/// kernel functions that those processes wait in. The dump reads only memory and files of /proc,
/// with a time limit for files of other processes.
async fn dump(containers: &Containers) {
    log::info!("=== BEGIN state dump ===");
    let children = children(children_of(getpid())).await;
    for line in [containers.describe(), threads(), children, descriptors()].concat() {
        log::info!("{line}");
    }
    log::info!("=== END state dump ===");
}

fn threads() -> Vec<String> {
    let mut lines = Vec::new();
    for tid in numbers_in("/proc/self/task") {
        let waits = waits_of(&format!("/proc/self/task/{tid}"));
        lines.push(format!("thread: tid {tid}{waits}"));
    }
    lines
}

/// Away from the event loop, which serves the pod while a child blocks its readers.
async fn children(pids: Vec<u32>) -> Vec<String> {
    let describe = move || {
        // A child is the init of a container, which can block the readers of these files.
        let all = read_each(&pids, |pid| waits_of(&format!("/proc/{pid}")));
        let mut lines = Vec::new();
        for (pid, waits) in pids.iter().zip(all) {
            let waits = waits.unwrap_or_else(|| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!(", {:?} blocks its readers", name.trim_end())
            });
            lines.push(format!("child: pid {pid}{waits}"));
        }
        lines
    };
    run_blocking(describe)
        .await
        .unwrap_or_else(|error| vec![format!("children: {error}")])
}

fn waits_of(folder: &str) -> String {
    let stat = fs::read_to_string(format!("{folder}/stat")).unwrap_or_default();
    let waits = fs::read_to_string(format!("{folder}/wchan")).unwrap_or_default();
    format!("{}, waits in {waits:?}", state_of(&stat))
}

/// `, NAME is S`; see proc_pid_stat(5).
fn state_of(stat: &str) -> String {
    let rest = stat.split_once(" (").map_or("", |(_, rest)| rest);
    match rest.rsplit_once(") ") {
        Some((name, rest)) => format!(", {name:?} is {}", &rest[..rest.len().min(1)]),
        None => String::new(),
    }
}

fn descriptors() -> Vec<String> {
    let mut lines = vec!["descriptors:".to_owned()];
    for number in numbers_in("/proc/self/fd") {
        // The directory's own descriptor is closed by now.
        let Ok(target) = fs::read_link(format!("/proc/self/fd/{number}")) else {
            continue;
        };
        let word = format!(" {number}={}", target.display());
        match lines.last_mut() {
            Some(line) if line.len() + word.len() <= MAX_LINE => line.push_str(&word),
            _ => lines.push(format!("descriptors:{word}")),
        }
    }
    lines
}

/// In numerical order.
fn numbers_in(folder: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        numbers.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

    use super::*;

    #[test]
    fn a_process_has_its_name_and_state() {
        assert_eq!(state_of("12 (a) b) S 1 12"), ", \"a) b\" is S");
        assert_eq!(state_of(""), "");
        assert!(
            threads().iter().any(|line| line.contains("waits in")),
            "{:?}",
            threads()
        );
    }

    #[test]
    fn a_child_that_hangs_in_execve_delays_neither_the_dump_nor_other_calls() {
        let Some(executing) = Executing::start() else {
            return;
        };
        let pid = executing.pid();
        let dump = move || {
            let event_loop = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            let is_done = Cell::new(false);
            event_loop.block_on(async {
                let dump = async {
                    let lines = children(vec![pid]).await;
                    is_done.set(true);
                    lines
                };
                tokio::join!(dump, async { is_done.get() })
            })
        };
        let (line, is_late) = unless_it_hangs(dump).expect("the dump hangs");
        assert!(!is_late, "the event loop waited");
        assert!(
            line[0].starts_with(&format!("child: pid {pid}, ")),
            "{line:?}"
        );
    }

    #[test]
    fn descriptors_are_on_lines_that_the_log_takes_whole() {
        let files: Vec<_> = (0..200)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        let lines = descriptors();
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE), "{lines:?}");
        assert!(
            lines.concat().matches("=/dev/null").count() >= files.len(),
            "{lines:?}"
        );
    }
}

#[cfg(test)]
mod connection_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::from((payload.len() as u32).to_be_bytes());
        frame.extend(stream.to_be_bytes());
        frame.extend([kind, 0]);
        frame.extend(payload);
        frame
    }

    fn request(service: &str, method: &str, payload: &[u8]) -> Vec<u8> {
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload: payload.to_owned(),
            timeout_nano: 7,
            ..Default::default()
        };
        request.write_to_bytes().unwrap()
    }

    /// The call of the method without a name.
    fn call(request: &[u8]) -> Vec<u8> {
        let timeout_nano = Request::parse_from_bytes(request).unwrap().timeout_nano;
        let call = Request {
            payload: request.to_owned(),
            timeout_nano,
            ..Default::default()
        };
        call.write_to_bytes().unwrap()
    }

    /// The input of ttrpc, for the input of a socket that arrives in pieces of this size.
    fn read(input: &[u8], piece: usize) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (socket, mut client) = duplex(piece);
            let (requests, mut server) = duplex(piece);
            let mut output = Vec::new();
            let (sent, _, _) = tokio::join!(
                async move { client.write_all(input).await },
                pass_on(socket, requests),
                server.read_to_end(&mut output)
            );
            sent.unwrap();
            output
        })
    }

    fn any_frame() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        let data = (prop_oneof![Just(2_u8), Just(3)], any::<u32>(), bytes());
        prop_oneof![
            data.prop_map(|(kind, stream, payload)| {
                let frame = frame(kind, stream, &payload);
                (frame.clone(), frame)
            }),
            ("[a-j.]{0,150}", any::<u32>(), bytes()).prop_map(|(service, stream, payload)| {
                let request = request(&service, "Method", &payload);
                (
                    frame(1, stream, &request),
                    frame(1, stream, &call(&request)),
                )
            }),
        ]
    }

    proptest! {
        #[test]
        fn only_requests_change(
            frames in prop::collection::vec(any_frame(), 0..6),
            piece in 1..64_usize,
            end in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let (mut input, mut expected) = (Vec::new(), Vec::new());
            for (sent, arrives) in frames {
                input.extend(sent);
                expected.extend(arrives);
            }
            // A header that is cut off.
            input.extend(&end[..end.len().min(MESSAGE_HEADER_LENGTH - 1)]);
            prop_assert_eq!(read(&input, piece), expected);
        }
    }

    #[test]
    fn a_frame_above_the_limit_passes() {
        let long = vec![10; MESSAGE_LENGTH_MAX + 1];
        let request = request("other", "M", b"");
        let input = [frame(1, 1, &long), frame(1, 3, &request)].concat();
        let expected = [frame(1, 1, &long), frame(1, 3, &call(&request))].concat();
        assert!(read(&input, 4096) == expected);
    }

    #[test]
    fn bytes_that_are_no_request_pass() {
        let input = frame(1, 1, b"\xff\xff\xff");
        assert_eq!(read(&input, 7), input);
    }
}

#[cfg(test)]
mod client_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use ttrpc::asynchronous::Client;
    use ttrpc::asynchronous::transport::Socket;
    use ttrpc::{Code, Error};

    use super::*;
    use crate::bootstrap::{is_alive, takes};
    use crate::service::{V2, V3, containers};

    const METHODS: [&str; 17] = [
        "Create",
        "Start",
        "Exec",
        "Delete",
        "Kill",
        "Pause",
        "Resume",
        "Update",
        "State",
        "Pids",
        "Wait",
        "CloseIO",
        "ResizePty",
        "Connect",
        "Shutdown",
        "Checkpoint",
        "Stats",
    ];

    /// Includes a server that has no such service, and does not know the container.
    #[tokio::test]
    async fn a_server_that_answers_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut server = Server::new().add_listener(Listener::try_from(listener).unwrap());
        server = server.register_service(HashMap::new());
        server.start().await.unwrap();
        assert!(is_alive(UnixStream::connect(&path).unwrap(), "c").await);
    }

    /// The refusal passes through ttrpc with its code, on which `start` depends.
    #[tokio::test]
    async fn a_server_waits_unless_it_is_about_to_end() {
        let folder = tempfile::tempdir().unwrap();
        for is_ending in [false, true] {
            let containers = Arc::new(containers());
            if is_ending {
                containers.shut_down();
            }
            let path = folder.path().join(is_ending.to_string());
            let mut server = server(UnixListener::bind(&path).unwrap(), &containers).unwrap();
            server.start().await.unwrap();
            let client = UnixStream::connect(&path).unwrap();
            assert_eq!(takes(client, "c").await, !is_ending);
        }
    }

    /// A server that never accepted the call, or ended during or after it.
    #[tokio::test]
    async fn a_server_that_hangs_up_is_dead_and_does_not_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for read_limit in [None, Some(1), Some(100)] {
            let listener = UnixListener::bind(&path).unwrap();
            let clients = [
                UnixStream::connect(&path).unwrap(),
                UnixStream::connect(&path).unwrap(),
            ];
            let server = thread::spawn(move || {
                let Some(most) = read_limit else { return };
                for _ in 0..2 {
                    let _ = listener.accept().unwrap().0.read(&mut vec![0; most]);
                }
            });
            let [one, other] = clients;
            assert!(!is_alive(one, "c").await, "{read_limit:?}");
            assert!(!takes(other, "c").await, "{read_limit:?}");
            server.join().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }

    /// As Go's ttrpc answers.
    #[tokio::test]
    async fn codes_of_calls_that_no_method_can_serve() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut server = server(listener, &Arc::new(containers())).unwrap();
        server.start().await.unwrap();
        let mut calls = vec![
            (V3, "State", &b""[..], Code::NOT_FOUND),
            (V3, "Dance", b"", Code::UNIMPLEMENTED),
            (
                "containerd.runtime.sandbox.v1.Sandbox",
                "Platform",
                b"",
                Code::UNIMPLEMENTED,
            ),
            (
                "containerd.services.streaming.v1.Streaming",
                "Stream",
                b"",
                Code::UNIMPLEMENTED,
            ),
            ("any.other.Service", "State", b"\xff", Code::UNIMPLEMENTED),
            ("bindguard.shim.v1.Group", "Expect", b"\xff", Code::INTERNAL),
            ("", "", b"", Code::UNIMPLEMENTED),
        ];
        for method in METHODS {
            for service in [V2, V3] {
                calls.push((service, method, b"\xff", Code::INTERNAL));
            }
        }
        for (service, method, payload, code) in calls {
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_nonblocking(true).unwrap();
            let client = Client::new(Socket::from(net::UnixStream::from_std(stream).unwrap()));
            let (service, method) = (service.to_owned(), method.to_owned());
            let request = Request {
                service,
                method,
                payload: payload.to_owned(),
                ..Default::default()
            };
            let called = format!("{}/{}", request.service, request.method);
            match client.request(request).await {
                Err(Error::RpcStatus(status)) => {
                    assert_eq!(status.code(), code, "{called}: {status}")
                }
                other => panic!("{called}: {other:?}"),
            }
        }
    }
}
