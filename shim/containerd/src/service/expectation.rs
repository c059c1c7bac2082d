//! The call by which `start` announces a container to a server that it finds.
//!
//! A pod's last container may be deleted, and its shim shut down, between a new container's `start`
//! and `Create`: the create would find no server. So `start` calls first. If the server answers
//! that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
//! older version, is used without the announcement.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::ConnectRequest;
use protobuf::Message;
use ttrpc::asynchronous::{MethodHandler, Service, TtrpcContext};
use ttrpc::{Code, Request, Response};

use super::Containers;
use super::client::{call_server, has_hung_up};

pub(super) const SERVICE: &str = "bindguard.shim.v1.Group";
const METHOD: &str = "Expect";

/// The server's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerAnswer {
    /// It waits for the container, or does not know the call.
    Waits,
    /// It is about to end.
    Ends,
}

/// Calls the server behind this connection.
pub(crate) async fn expect(server: UnixStream, id: &str) -> ServerAnswer {
    match call_server(server, SERVICE, METHOD, id).await {
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

/// The server's side.
pub(super) fn service(containers: &Arc<Containers>) -> Service {
    let method: Box<dyn MethodHandler + Send + Sync> = Box::new(Expect {
        containers: Arc::clone(containers),
    });
    Service {
        methods: HashMap::from([(METHOD.to_owned(), method)]),
        streams: HashMap::new(),
    }
}

struct Expect {
    containers: Arc<Containers>,
}

#[async_trait]
impl MethodHandler for Expect {
    async fn handler(&self, _: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        let message = ConnectRequest::parse_from_bytes(&request.payload)
            .map_err(|error| ttrpc::Error::Others(error.to_string()))?;
        // `decoded` keeps the code of a refusal.
        self.containers.expect(&message.id)?;
        Ok(Response::new())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use ttrpc::asynchronous::Server;
    use ttrpc::asynchronous::transport::Listener;

    use super::*;
    use crate::service::containers::tests::containers;
    use crate::service::decoding::decoded;
    use crate::service::is_alive;

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
            let methods = HashMap::from([(SERVICE.to_owned(), decoded(service(&containers)))]);
            let mut server = Server::new()
                .add_listener(Listener::try_from(listener).unwrap())
                .register_service(methods);
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
