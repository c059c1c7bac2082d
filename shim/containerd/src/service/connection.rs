//! Connections between a server and its clients: the requests that a server receives, and the calls
//! of `start` and `delete` to a server that they find at a socket.
//!
//! Go's ttrpc answers UNIMPLEMENTED for an unknown service, and containerd tries something else at
//! this code alone. The Rust one answers INVALID_ARGUMENT and has no hook for that. So ttrpc knows a
//! single method without a name, and each request arrives as the payload of a call of this method.
//! All other bytes pass unchanged.
//!
//! A frame is a header of ten bytes and a payload: ttrpc's PROTOCOL.md.

use std::io;
use std::os::unix::net;
use std::task::{Poll, ready};
use std::time::Duration;

use containerd_shim_protos::api::ConnectRequest;
use futures_util::stream::poll_fn;
use protobuf::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, duplex, join};
use tokio::net::{UnixListener, UnixStream};
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::{Listener, Socket};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST};
use ttrpc::{Code, Error, MessageHeader, Request, Response};

use super::{EXPECT, V3};

/// The largest number of bytes that wait for ttrpc. An idle connection keeps a buffer of the size
/// of its largest request, up to this number.
const MAX_WAITING: usize = 1024;

/// The connections of clients, with each request as a call of the method without a name.
pub fn accept_from(listener: net::UnixListener) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    Ok(Listener::new(poll_fn(move |context| {
        let accepted = ready!(listener.poll_accept(context));
        Poll::Ready(Some(accepted.map(|(socket, _)| {
            let (read, write) = socket.into_split();
            let (requests, server) = duplex(MAX_WAITING);
            tokio::spawn(pass_on(read, requests));
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

/// The time limit: a server that hangs must not block the caller.
const LIMIT: Duration = Duration::from_secs(2);

/// True if the connection's server lives. The kernel accepts for a killed server until its files
/// are closed, and then hangs up. A living server answers, with or without the container. A server
/// that hangs counts as alive.
pub async fn is_alive(server: net::UnixStream, id: &str) -> bool {
    let answer = call_server(server, V3, "Connect", id).await;
    !answer.is_err_and(|error| has_hung_up(&error))
}

/// Calls a method whose only argument is the container.
async fn call_server(
    server: net::UnixStream,
    service: &str,
    method: &str,
    id: &str,
) -> ttrpc::Result<Response> {
    let message = ConnectRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let request = Request {
        service: service.to_owned(),
        method: method.to_owned(),
        timeout_nano: i64::try_from(LIMIT.as_nanos()).unwrap_or(i64::MAX),
        payload: message.write_to_bytes().map_err(other)?,
        ..Default::default()
    };
    server.set_nonblocking(true).map_err(other)?;
    let server = UnixStream::from_std(server).map_err(other)?;
    Client::new(Socket::from(server)).request(request).await
}

fn other(error: impl std::error::Error) -> Error {
    Error::Others(error.to_string())
}

/// True unless the error is an answer, a missed time limit, or a call that could not be sent.
fn has_hung_up(error: &Error) -> bool {
    !matches!(error, Error::RpcStatus(_) | Error::Others(_))
}

/// Announces a container to the server behind this connection, for `start`. False if the server is
/// about to end.
///
/// A pod's last container may be deleted, and its shim shut down, between a new container's `start`
/// and `Create`: the create would find no server. So `start` calls first. If the server answers
/// that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
/// older version, is used without the announcement.
pub async fn takes(server: net::UnixStream, id: &str) -> bool {
    let (service, method) = EXPECT.split_once('/').unwrap_or_default();
    match call_server(server, service, method, id).await {
        Err(Error::RpcStatus(status)) => status.code() != Code::UNAVAILABLE,
        Err(error @ Error::Others(_)) => {
            tracing::warn!(%error, "announce the container to the shim of its group");
            true
        }
        // The server hung up before, during or after the call.
        Err(_) => false,
        Ok(_) => true,
    }
}

#[cfg(test)]
mod tests {
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

    use std::collections::HashMap;
    use std::io::Read;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use std::{fs, thread};

    use ttrpc::asynchronous::Server;

    use super::{Listener, is_alive, takes};
    use crate::service::containers::tests::containers;
    use crate::service::server;

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
}
