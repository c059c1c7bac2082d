//! Calls to a server that `start` or `delete` finds at a socket.

use std::error::Error;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use containerd_shim_protos::api::ConnectRequest;
use protobuf::Message;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, Request, Response};

use super::V3;

/// The time limit: a server that hangs must not block the caller.
const LIMIT: Duration = Duration::from_secs(2);

pub const EXPECT_SERVICE: &str = "bindguard.shim.v1.Group";
pub const EXPECT: &str = "Expect";

/// True if the connection's server lives. The kernel accepts for a killed server until its files
/// are closed, and then hangs up. A living server answers, with or without the container. A server
/// that hangs counts as alive.
pub async fn is_alive(server: UnixStream, id: &str) -> bool {
    let answer = call_server(server, V3, "Connect", id).await;
    !answer.is_err_and(|error| has_hung_up(&error))
}

/// Calls a method whose only argument is the container.
async fn call_server(
    server: UnixStream,
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
    let server = tokio::net::UnixStream::from_std(server).map_err(other)?;
    Client::new(Socket::from(server)).request(request).await
}

fn other(error: impl Error) -> ttrpc::Error {
    ttrpc::Error::Others(error.to_string())
}

/// True unless the error is an answer, a missed time limit, or a call that could not be sent.
fn has_hung_up(error: &ttrpc::Error) -> bool {
    !matches!(error, ttrpc::Error::RpcStatus(_) | ttrpc::Error::Others(_))
}

/// The server's answer to `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerAnswer {
    /// It waits for the container, or does not know the call.
    Waits,
    /// It is about to end.
    Ends,
}

/// Announces a container to the server behind this connection, for `start`.
///
/// A pod's last container may be deleted, and its shim shut down, between a new container's `start`
/// and `Create`: the create would find no server. So `start` calls first. If the server answers
/// that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
/// older version, is used without the announcement.
pub async fn expect(server: UnixStream, id: &str) -> ServerAnswer {
    match call_server(server, EXPECT_SERVICE, EXPECT, id).await {
        Err(ttrpc::Error::RpcStatus(status)) if status.code() == Code::UNAVAILABLE => {
            ServerAnswer::Ends
        }
        // The server hung up before, during or after the call.
        Err(error) if has_hung_up(&error) => ServerAnswer::Ends,
        Err(error @ ttrpc::Error::Others(_)) => {
            tracing::warn!(%error, "announce the container to the shim of its group");
            ServerAnswer::Waits
        }
        Ok(_) | Err(_) => ServerAnswer::Waits,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashMap;
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::{fs, thread};

    use ttrpc::asynchronous::Server;
    use ttrpc::asynchronous::transport::Listener;

    use super::*;
    use crate::service::containers::tests::containers;
    use crate::service::{is_alive, services};

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
        for answer in [ServerAnswer::Waits, ServerAnswer::Ends] {
            let containers = Arc::new(containers());
            if answer == ServerAnswer::Ends {
                containers.shut_down();
            }
            let path = folder.path().join(format!("{answer:?}"));
            let listener = UnixListener::bind(&path).unwrap();
            listener.set_nonblocking(true).unwrap();
            let mut server = Server::new()
                .add_listener(Listener::try_from(listener).unwrap())
                .register_service(services(&containers));
            server.start().await.unwrap();
            assert_eq!(
                expect(UnixStream::connect(&path).unwrap(), "c").await,
                answer
            );
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
            assert_eq!(
                expect(other, "c").await,
                ServerAnswer::Ends,
                "{read_limit:?}"
            );
            server.join().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
}
