//! A connection to the runtime, from the registration to the end.

use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use bindguard_core::plan::refusal_of_unseen;
use bindguard_operator::unix_http::refuse_server_of_user;
use prost::Message as _;
use prost::bytes::Bytes;
use tracing::{info, warn};

use super::messages::{
    CREATE_CONTAINER, ConfigureRequest, ConfigureResponse, ContainerAdjustment,
    CreateContainerRequest, CreateContainerResponse, CreatedContainer, PLUGIN, RUNTIME,
    RegisterPluginRequest, START_CONTAINER, START_CONTAINER_EVENT, StartContainerRequest,
    StateChangeEvent, SynchronizeRequest, SynchronizeResponse, VALIDATE_CONTAINER, ValidateRequest,
    ValidateResponse,
};
use super::ttrpc::{Incoming, Message, Request, Response, RpcStatus, TtrpcError};
use crate::sources::nri::ttrpc::{TO_PLUGIN, TO_RUNTIME, read_frame, write_frames};
use crate::sources::nri::{Calls, CreateRefused};

const NAME: &str = "bindguard";
/// The runtime calls plugins in the order of these digits. The last digits: bindguard also checks
/// the mounts that the other plugins add. The order of plugins with the same digits is not defined.
const INDEX: &str = "99";

/// The version of NRI with all the calls that the plugin serves.
const NRI_VERSION: &str = "v0.12.0";

/// A runtime that reads nothing for this long is not served any more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The runtime does not listen.
    #[error("connect")]
    Connect(#[source] io::Error),
    #[error("read or write")]
    Socket(#[from] io::Error),
    /// The bytes are no messages.
    #[error("read a message of the runtime")]
    Ttrpc(#[from] TtrpcError),
    /// The runtime does not accept the plugin.
    #[error("register: {0}")]
    Refused(String),
    /// The plugin has a fault.
    #[error("the thread panicked")]
    Panicked,
}

#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    requests: Incoming,
    answers: Incoming,
    /// The containers in the parts of a list so far.
    listed: usize,
}

impl Connection {
    /// Connects and registers.
    ///
    /// # Errors
    /// If the runtime does not listen.
    pub fn register(socket: &Path) -> Result<Self, ConnectionError> {
        let stream = UnixStream::connect(socket).map_err(ConnectionError::Connect)?;
        refuse_server_of_user(&stream).map_err(ConnectionError::Connect)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let plugin = RegisterPluginRequest {
            plugin_name: NAME.to_owned(),
            plugin_idx: INDEX.to_owned(),
            nri_version: NRI_VERSION.to_owned(),
        };
        let call = Request {
            service: RUNTIME.to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: plugin.encode_to_vec().into(),
        };
        // PROTOCOL.md of ttrpc: a client's streams have odd numbers.
        write_frames(
            &mut &stream,
            TO_RUNTIME,
            &Message::Request(1, call).to_bytes(),
        )?;
        Ok(Self {
            stream,
            requests: Incoming::default(),
            answers: Incoming::default(),
            listed: 0,
        })
    }

    /// Serves until the runtime closes the connection.
    ///
    /// # Errors
    /// If the socket fails, the runtime refuses the plugin, or it sends something else than
    /// messages.
    pub fn serve(self, calls: &Calls) -> Result<(), ConnectionError> {
        match self.serve_frames(calls) {
            // The runtime closed it while an answer was on its way.
            Err(ConnectionError::Socket(error)) if is_closed(&error) => Ok(()),
            ended => ended,
        }
    }

    fn serve_frames(mut self, calls: &Calls) -> Result<(), ConnectionError> {
        let mut reader = BufReader::new(self.stream.try_clone()?);
        while let Some(frame) = read_frame(&mut reader)? {
            match frame.connection {
                TO_PLUGIN => {
                    self.requests.push(&frame.payload);
                    self.answer(calls)?;
                }
                TO_RUNTIME => {
                    self.answers.push(&frame.payload);
                    self.check_registration()?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_registration(&mut self) -> Result<(), ConnectionError> {
        while let Some(message) = self.answers.next_message()? {
            if let Message::Response(
                _,
                Response {
                    status: Some(status),
                    ..
                },
            ) = message
                && status.code != 0
            {
                return Err(ConnectionError::Refused(status.message));
            }
        }
        Ok(())
    }

    fn answer(&mut self, calls: &Calls) -> Result<(), ConnectionError> {
        while let Some(message) = self.requests.next_message()? {
            let Message::Request(stream, request) = message else {
                continue;
            };
            let response = match self.call(&request, calls) {
                Ok(payload) => Response {
                    status: None,
                    payload,
                },
                Err(status) => Response {
                    status: Some(status),
                    payload: Vec::new(),
                },
            };
            write_frames(
                &mut &self.stream,
                TO_PLUGIN,
                &Message::Response(stream, response).to_bytes(),
            )?;
        }
        Ok(())
    }

    fn call(&mut self, request: &Request, calls: &Calls) -> Result<Vec<u8>, RpcStatus> {
        let payload = request.payload.clone();
        match (request.service.as_str(), request.method.as_str()) {
            (PLUGIN, "Configure") => Ok(configure(payload, calls)),
            (PLUGIN, "Synchronize") => Ok(self.synchronize(payload, calls)),
            (PLUGIN, "CreateContainer") => create_container(payload, calls),
            (PLUGIN, "ValidateContainerAdjustment") => Ok(validate_container(payload, calls)),
            (PLUGIN, "StartContainer") => start_container(payload, calls),
            (PLUGIN, "StateChange") => change_state(payload, calls),
            // Empty answers. The plugin subscribes to no other event.
            (PLUGIN, "StopContainer" | "Shutdown") => Ok(Vec::new()),
            (service, method) => Err(RpcStatus {
                code: RpcStatus::UNIMPLEMENTED,
                message: format!("{service}/{method} is not served"),
            }),
        }
    }

    /// The survey and the kubelet's events already lead to the running containers; the list only
    /// shows that the runtime accepts the plugin.
    fn synchronize(&mut self, payload: Bytes, calls: &Calls) -> Vec<u8> {
        let part = SynchronizeRequest::decode(payload).unwrap_or_else(|error| {
            warn!("read the runtime's list of containers: {error}");
            SynchronizeRequest::default()
        });
        self.listed += part.containers.len();
        if !part.more {
            info!("NRI plugin registered; {} containers exist", self.listed);
            calls.metrics.nri.connected.set(1);
            calls.metrics.nri.registrations.inc();
            self.listed = 0;
        }
        SynchronizeResponse { more: part.more }.encode_to_vec()
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// A runtime fails the create if a plugin that validates ends or is late. So the plugin validates
/// only where policy refuses unchecked mounts anyway.
fn configure(payload: Bytes, calls: &Calls) -> Vec<u8> {
    let mut events = CREATE_CONTAINER | START_CONTAINER;
    if let Ok(runtime) = ConfigureRequest::decode(payload) {
        info!(
            "NRI plugin of {} {}",
            runtime.runtime_name, runtime.runtime_version
        );
        if !runtime.nri_version.is_empty() && refusal_of_unseen("", calls.config.policy()).is_some()
        {
            events |= VALIDATE_CONTAINER;
        }
    }
    ConfigureResponse { events }.encode_to_vec()
}

/// An empty answer changes nothing.
fn create_container(payload: Bytes, calls: &Calls) -> Result<Vec<u8>, RpcStatus> {
    let mounts = match CreateContainerRequest::decode(payload) {
        Ok(request) => calls.adjust(request),
        Err(error) => calls.unread_create(&error),
    };
    let mounts = mounts.map_err(status_of)?;
    let adjust = (!mounts.is_empty()).then_some(ContainerAdjustment { mounts });
    Ok(CreateContainerResponse { adjust }.encode_to_vec())
}

fn validate_container(payload: Bytes, calls: &Calls) -> Vec<u8> {
    let checked = match ValidateRequest::decode(payload) {
        Ok(request) => calls.validate(request),
        Err(error) => calls.unread_create(&error).map(drop),
    };
    let mut answer = ValidateResponse::default();
    if let Err(refused) = checked {
        answer.reject = true;
        answer.reason = refused.to_string();
    }
    answer.encode_to_vec()
}

fn start_container(payload: Bytes, calls: &Calls) -> Result<Vec<u8>, RpcStatus> {
    match StartContainerRequest::decode(payload) {
        Ok(request) => start(request.container, calls),
        Err(error) => answer_start(calls.unread_start(&error)),
    }
}

fn change_state(payload: Bytes, calls: &Calls) -> Result<Vec<u8>, RpcStatus> {
    match StateChangeEvent::decode(payload) {
        Ok(change) if change.event == START_CONTAINER_EVENT => start(change.container, calls),
        Ok(_) => Ok(Vec::new()),
        Err(error) => answer_start(calls.unread_start(&error)),
    }
}

fn start(container: Option<CreatedContainer>, calls: &Calls) -> Result<Vec<u8>, RpcStatus> {
    answer_start(calls.check(container.unwrap_or_default()))
}

fn answer_start(checked: Result<(), CreateRefused>) -> Result<Vec<u8>, RpcStatus> {
    checked.map(|()| Vec::new()).map_err(status_of)
}

fn status_of(refused: CreateRefused) -> RpcStatus {
    RpcStatus {
        code: RpcStatus::FAILED_PRECONDITION,
        message: refused.to_string(),
    }
}

#[cfg(test)]
mod tests;
