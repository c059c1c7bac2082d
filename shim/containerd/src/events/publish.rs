//! The task that calls containerd's event service.
//!
//! The task connects for the first event and keeps the connection. A transport failure (no socket,
//! a broken connection, no answer in time) is retried without end, with a growing pause. An event
//! that containerd rejects repeatedly is dropped with a log line: it would block all later events.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::EventsClient;
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use tokio::net::UnixStream;
use tokio::time::sleep;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, context};

use super::queue::{Item, Queue};
use super::{Queued, timestamp};

const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// containerd may reject the same event this many times.
const REJECTIONS: u32 = 8;

enum PublishError {
    /// containerd could not be reached.
    Transport(String),
    /// containerd rejected the event.
    Rejected(String),
}

/// Sends the queued events, in order, until the shim ends.
pub(super) async fn publish(address: String, namespace: String, queue: Arc<Queue>) {
    let mut publisher = Publisher {
        address,
        namespace,
        client: None,
    };
    loop {
        match queue.next().await {
            Item::Event(event) => publisher.deliver(&event).await,
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

struct Publisher {
    address: String,
    namespace: String,
    client: Option<EventsClient>,
}

impl Publisher {
    async fn deliver(&mut self, event: &Queued) {
        let mut pause = FIRST_PAUSE;
        let mut rejections = 0;
        loop {
            match self.try_deliver(event).await {
                Ok(()) => return,
                Err(PublishError::Rejected(why)) => {
                    rejections += 1;
                    if rejections >= REJECTIONS {
                        tracing::error!(
                            topic = event.topic,
                            "containerd does not take an event: {why}"
                        );
                        return;
                    }
                }
                Err(PublishError::Transport(why)) => {
                    self.client = None;
                    tracing::debug!(topic = event.topic, "containerd cannot be reached: {why}");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn try_deliver(&mut self, event: &Queued) -> Result<(), PublishError> {
        let request = self.request(event);
        let client = self.connected().await?;
        match client
            .forward(context::with_duration(ANSWER_LIMIT), &request)
            .await
        {
            Ok(_) => Ok(()),
            Err(ttrpc::Error::RpcStatus(status))
                if !matches!(status.code(), Code::UNAVAILABLE | Code::DEADLINE_EXCEEDED) =>
            {
                Err(PublishError::Rejected(status.message))
            }
            Err(error) => Err(PublishError::Transport(error.to_string())),
        }
    }

    async fn connected(&mut self) -> Result<&EventsClient, PublishError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                let path = self
                    .address
                    .strip_prefix("unix://")
                    .unwrap_or(&self.address);
                let connecting =
                    tokio::time::timeout(ANSWER_LIMIT, UnixStream::connect(path)).await;
                let stream = connecting
                    .map_err(|elapsed| PublishError::Transport(elapsed.to_string()))?
                    .map_err(|error| {
                        PublishError::Transport(format!("connect to {path}: {error}"))
                    })?;
                EventsClient::new(Client::new(Socket::from(stream)))
            }
        };
        Ok(self.client.insert(client))
    }

    fn request(&self, event: &Queued) -> ForwardRequest {
        let any = Any {
            // Go's registry has the full name alone.
            type_url: format!("containerd.events.{}", event.name),
            value: event.value.clone(),
            ..Default::default()
        };
        let envelope = Envelope {
            timestamp: timestamp(event.at),
            namespace: self.namespace.clone(),
            topic: event.topic.to_owned(),
            event: MessageField::some(any),
            ..Default::default()
        };
        ForwardRequest {
            envelope: MessageField::some(envelope),
            ..Default::default()
        }
    }
}
