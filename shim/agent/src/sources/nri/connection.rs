//! A connection to the runtime, from the registration to the end.

use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bindguard_core::judge::refusal_of_unseen;
use prost::{DecodeError, Message as _};
use tracing::{info, warn};

use super::Calls;
use super::messages::{
    CREATE_CONTAINER, ConfigureRequest, ConfigureResponse, ContainerAdjustment,
    CreateContainerRequest, CreateContainerResponse, CreatedContainer, PLUGIN, RUNTIME,
    RegisterPluginRequest, START_CONTAINER, START_CONTAINER_EVENT, StartContainerRequest,
    StateChangeEvent, SynchronizeRequest, SynchronizeResponse, VALIDATE_CONTAINER, ValidateRequest,
    ValidateResponse,
};
use super::ttrpc::{
    Incoming, Message, Request, Response, RpcStatus, TO_PLUGIN, TO_RUNTIME, read_frame,
    write_frames,
};
use crate::host::connect;
use crate::sinks::metrics::{Level, Total};

const NAME: &str = "bindguard";
/// The runtime calls plugins in the order of these digits. The last digits: bindguard also checks
/// the mounts that the other plugins add. The order of plugins with the same digits is not defined.
const INDEX: &str = "99";

/// The version of NRI with all the calls that the plugin serves.
const NRI_VERSION: &str = "v0.12.0";

/// A runtime that reads nothing for this long is not served any more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Connection<'c> {
    calls: &'c Calls,
    stream: UnixStream,
    /// The containers in the parts of a list so far.
    listed: usize,
}

impl<'c> Connection<'c> {
    /// Connects and registers.
    ///
    /// # Errors
    /// If the runtime does not listen.
    pub fn register(socket: &Path, calls: &'c Calls) -> Result<Self> {
        let stream = connect(socket).context("connect")?;
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
        let call = Message::Request(1, call).to_bytes();
        let timeout = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        timeout
            .and_then(|()| write_frames(&mut &stream, TO_RUNTIME, &call))
            .context("read or write")?;
        Ok(Self {
            calls,
            stream,
            listed: 0,
        })
    }

    /// Serves until the runtime closes the connection.
    ///
    /// # Errors
    /// If the socket fails, the runtime refuses the plugin, or it sends something else than
    /// messages.
    pub fn serve(self) -> Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};

        let ended = self.serve_frames();
        ended.or_else(|error| match error.downcast_ref::<io::Error>() {
            // The runtime closed it while an answer was on its way.
            Some(closed) if matches!(closed.kind(), BrokenPipe | ConnectionReset) => Ok(()),
            Some(_) => Err(error.context("read or write")),
            None => Err(error),
        })
    }

    fn serve_frames(mut self) -> Result<()> {
        let mut reader = BufReader::new(self.stream.try_clone()?);
        let (mut requests, mut answers) = (Incoming::default(), Incoming::default());
        while let Some(frame) = read_frame(&mut reader)? {
            let incoming = match frame.connection {
                TO_PLUGIN => &mut requests,
                TO_RUNTIME => &mut answers,
                _ => continue,
            };
            incoming.push(&frame.payload);
            while let Some(message) = incoming
                .next_message()
                .context("read a message of the runtime")?
            {
                match (frame.connection, message) {
                    (TO_PLUGIN, Message::Request(stream, request)) => {
                        let mut response = Response::default();
                        match self.call(request) {
                            Ok(payload) => response.payload = payload,
                            Err(status) => response.status = Some(status),
                        }
                        let answer = Message::Response(stream, response).to_bytes();
                        write_frames(&mut &self.stream, TO_PLUGIN, &answer)?;
                    }
                    (TO_RUNTIME, Message::Response(_, response)) => {
                        if let Some(status) = response.status.filter(|status| status.code != 0) {
                            bail!("register: {}", status.message);
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn call(&mut self, request: Request) -> Result<Vec<u8>, RpcStatus> {
        let (payload, calls) = (request.payload, self.calls);
        match (request.service.as_str(), request.method.as_str()) {
            (PLUGIN, "Configure") => {
                let mut events = CREATE_CONTAINER | START_CONTAINER;
                if let Ok(runtime) = ConfigureRequest::decode(payload) {
                    let (name, version) = (runtime.runtime_name, runtime.runtime_version);
                    info!("NRI plugin of {name} {version}");
                    // A runtime fails the create if a plugin that validates ends or is late. So the
                    // plugin validates only where policy refuses unchecked mounts anyway.
                    let refuses = refusal_of_unseen("", calls.node.config.policy()).is_some();
                    if !runtime.nri_version.is_empty() && refuses {
                        events |= VALIDATE_CONTAINER;
                    }
                }
                Ok(ConfigureResponse { events }.encode_to_vec())
            }
            // The survey and the kubelet's events already lead to the running containers; the list
            // only shows that the runtime accepts the plugin.
            (PLUGIN, "Synchronize") => {
                let part = SynchronizeRequest::decode(payload).unwrap_or_else(|error| {
                    warn!("read the runtime's list of containers: {error}");
                    SynchronizeRequest::default()
                });
                self.listed += part.containers.len();
                if !part.more {
                    info!("NRI plugin registered; {} containers exist", self.listed);
                    calls.node.metrics[Level::NriConnected].set(1);
                    calls.node.metrics[Total::NriRegistrations].inc();
                    self.listed = 0;
                }
                Ok(SynchronizeResponse { more: part.more }.encode_to_vec())
            }
            // An empty answer changes nothing.
            (PLUGIN, "CreateContainer") => {
                let mounts = match CreateContainerRequest::decode(payload) {
                    Ok(request) => calls.adjust(request),
                    Err(error) => calls.unread_create(&error),
                }?;
                let adjust = (!mounts.is_empty()).then_some(ContainerAdjustment { mounts });
                Ok(CreateContainerResponse { adjust }.encode_to_vec())
            }
            (PLUGIN, "ValidateContainerAdjustment") => {
                let checked = match ValidateRequest::decode(payload) {
                    Ok(request) => calls.validate(request),
                    Err(error) => calls.unread_create(&error).map(drop),
                };
                let mut answer = ValidateResponse::default();
                if let Err(refused) = checked {
                    answer.reject = true;
                    answer.reason = refused.message;
                }
                Ok(answer.encode_to_vec())
            }
            (PLUGIN, "StartContainer") => {
                let request = StartContainerRequest::decode(payload);
                start(request.map(|request| request.container), calls)
            }
            (PLUGIN, "StateChange") => match StateChangeEvent::decode(payload) {
                Ok(change) if change.event != START_CONTAINER_EVENT => Ok(Vec::new()),
                change => start(change.map(|change| change.container), calls),
            },
            // Empty answers. The plugin subscribes to no other event.
            (PLUGIN, "StopContainer" | "Shutdown") => Ok(Vec::new()),
            (service, method) => Err(RpcStatus {
                code: RpcStatus::UNIMPLEMENTED,
                message: format!("{service}/{method} is not served"),
            }),
        }
    }
}

fn start(
    container: Result<Option<CreatedContainer>, DecodeError>,
    calls: &Calls,
) -> Result<Vec<u8>, RpcStatus> {
    match container {
        Ok(container) => calls.check(container.unwrap_or_default()),
        Err(error) => calls.unread_start(&error),
    }
    .map(|()| Vec::new())
}

#[cfg(test)]
mod tests;
