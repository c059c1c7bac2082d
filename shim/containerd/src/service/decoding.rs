//! The answer to a request that cannot be decoded.
//!
//! Go's ttrpc answers INTERNAL. Rust's ttrpc answers UNKNOWN to any error of a handler. A handler
//! returns only errors of decoding and encoding: the response already has the error of a method.

use async_trait::async_trait;
use ttrpc::asynchronous::{MethodHandler, Service, TtrpcContext};
use ttrpc::{Code, Error, Request, Response, get_status};

type Handler = Box<dyn MethodHandler + Send + Sync>;

/// Adds an answer to undecodable requests to the service.
pub(super) fn decoded(service: Service) -> Service {
    let answering = |(name, handler)| (name, Box::new(Decoding(handler)) as Handler);
    Service {
        methods: service.methods.into_iter().map(answering).collect(),
        streams: service.streams,
    }
}

struct Decoding(Handler);

#[async_trait]
impl MethodHandler for Decoding {
    async fn handler(&self, context: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        let answer = self.0.handler(context, request).await;
        Ok(answer.unwrap_or_else(|error| match error {
            Error::RpcStatus(status) => Error::RpcStatus(status).into(),
            error => Error::RpcStatus(get_status(Code::INTERNAL, error.to_string())).into(),
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;

    use ttrpc::asynchronous::transport::{Listener, Socket};
    use ttrpc::asynchronous::{Client, Server};

    use super::*;
    use crate::service::containers::tests::containers;
    use crate::service::{V2, V3, answering_unknown, services};

    /// As Go's ttrpc answers.
    #[tokio::test]
    async fn codes_of_calls_that_no_method_can_serve() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = Listener::try_from(listener).unwrap();
        let services = services(&Arc::new(containers()));
        let listener = answering_unknown(listener, services.keys());
        let mut server = Server::new()
            .add_listener(listener)
            .register_service(services);
        server.start().await.unwrap();
        for (service, method, payload, code) in [
            (V2, "State", &b"\xff"[..], Code::INTERNAL),
            (V3, "Create", b"\xff", Code::INTERNAL),
            (V3, "State", b"", Code::NOT_FOUND),
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
            ("", "", b"", Code::UNIMPLEMENTED),
        ] {
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_nonblocking(true).unwrap();
            let client = Client::new(Socket::from(
                tokio::net::UnixStream::from_std(stream).unwrap(),
            ));
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
