//! A call to a server that `start` or `delete` finds at a socket.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use containerd_shim_protos::api::ConnectRequest;
use protobuf::Message;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Request, Response};

use super::V3;

/// The time limit: a server that hangs must not block the caller.
const LIMIT: Duration = Duration::from_secs(2);

/// True if the connection's server lives. The kernel accepts for a killed server until its files
/// are closed, and then hangs up. A living server answers, with or without the container. A server
/// that hangs counts as alive.
pub(crate) async fn is_alive(server: UnixStream, id: &str) -> bool {
    !call_server(server, V3, "Connect", id)
        .await
        .is_err_and(|error| has_hung_up(&error))
}

/// Calls a method whose only argument is the container.
pub(super) async fn call_server(
    server: UnixStream,
    service: &str,
    method: &str,
    id: &str,
) -> ttrpc::Result<Response> {
    let other = |error: &dyn std::error::Error| ttrpc::Error::Others(error.to_string());
    server
        .set_nonblocking(true)
        .map_err(|error| other(&error))?;
    let server = tokio::net::UnixStream::from_std(server).map_err(|error| other(&error))?;
    let message = ConnectRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let request = Request {
        service: service.to_owned(),
        method: method.to_owned(),
        timeout_nano: i64::try_from(LIMIT.as_nanos()).unwrap_or(i64::MAX),
        payload: message.write_to_bytes().map_err(|error| other(&error))?,
        ..Default::default()
    };
    Client::new(Socket::from(server)).request(request).await
}

/// True unless the error is an answer, a missed time limit, or a call that could not be sent.
pub(super) fn has_hung_up(error: &ttrpc::Error) -> bool {
    !matches!(error, ttrpc::Error::RpcStatus(_) | ttrpc::Error::Others(_))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashMap;
    use std::os::unix::net::UnixListener;

    use ttrpc::asynchronous::Server;
    use ttrpc::asynchronous::transport::Listener;

    use super::*;

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
}
