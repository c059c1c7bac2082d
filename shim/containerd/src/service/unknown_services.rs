//! The answer to a request for a service that the shim does not have.
//!
//! Go's ttrpc answers UNIMPLEMENTED, and containerd tries something else at this code alone. The
//! Rust one answers INVALID_ARGUMENT and has no hook for that, but it answers UNIMPLEMENTED for an
//! unknown method. So the bytes of a connection are read here first, frame by frame: a request for
//! an unknown service becomes one for an unknown method of the task service. All other bytes pass
//! unchanged.
//!
//! A frame is a header of ten bytes and a payload: ttrpc's PROTOCOL.md.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::stream::poll_fn;
use protobuf::Message;
use tokio::io::{AsyncRead, ReadBuf, join};
use tokio::net::UnixListener;
use ttrpc::asynchronous::transport::Listener;
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST};
use ttrpc::{MessageHeader, Request};

use super::V3;

/// The tag of the field `service`, the first field of a request.
const SERVICE_TAG: u8 = 10;
/// The largest number of bytes to read at once.
const STEP: usize = 4096;

/// The connections to a server of these services.
pub fn answering_unknown<'a>(
    listener: UnixListener,
    services: impl Iterator<Item = &'a String>,
) -> Listener {
    let known: Arc<[String]> = services.cloned().collect();
    Listener::new(poll_fn(move |context| {
        let accepted = ready!(listener.poll_accept(context));
        Poll::Ready(Some(accepted.map(|(socket, _)| {
            let (read, write) = socket.into_split();
            join(Requests::of(read, Arc::clone(&known)), write)
        })))
    }))
}

/// The input of a connection.
struct Requests<S> {
    socket: S,
    known: Arc<[String]>,
    /// Bytes that were read and not handed on: the beginning of a frame, or all of a request.
    frame: Vec<u8>,
    /// The number of bytes to hand on, those of `frame` first; 0 while a frame is being read.
    passing: usize,
}

impl<S: AsyncRead + Unpin> Requests<S> {
    fn of(socket: S, known: Arc<[String]>) -> Self {
        Self {
            socket,
            known,
            frame: Vec::new(),
            passing: 0,
        }
    }

    /// Reads a frame up to the point at which it can be handed on: a header, and all of a request.
    /// At the end of the stream all bytes can.
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut wanted = MESSAGE_HEADER_LENGTH;
            if self.frame.len() >= wanted {
                let header = MessageHeader::from(&self.frame);
                let length = header.length as usize;
                let is_request =
                    header.type_ == MESSAGE_TYPE_REQUEST && length <= MESSAGE_LENGTH_MAX;
                if is_request {
                    wanted += length;
                }
                if self.frame.len() == wanted {
                    self.passing = MESSAGE_HEADER_LENGTH + length;
                    if is_request && let Some(other) = self.redirected() {
                        self.passing = other.len();
                        self.frame = other;
                    }
                    return Poll::Ready(Ok(()));
                }
            }
            let mut buffer = [0; STEP];
            let size = STEP.min(wanted - self.frame.len());
            let mut read = ReadBuf::new(&mut buffer[..size]);
            ready!(Pin::new(&mut self.socket).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                self.passing = self.frame.len();
                return Poll::Ready(Ok(()));
            }
            self.frame.extend_from_slice(read.filled());
        }
    }

    /// The replacement for the frame of a request for an unknown service.
    fn redirected(&self) -> Option<Vec<u8>> {
        let (header, payload) = self.frame.split_at_checked(MESSAGE_HEADER_LENGTH)?;
        if self.known.iter().any(|name| names(payload, name)) {
            return None;
        }
        // What cannot be parsed is ttrpc's to answer.
        let request = Request::parse_from_bytes(payload).ok()?;
        if self.known.contains(&request.service) {
            return None;
        }
        let request = Request {
            // No method has a name with a slash.
            service: V3.to_owned(),
            method: format!("{}/{}", request.service, request.method),
            timeout_nano: request.timeout_nano,
            ..Default::default()
        };
        let payload = request.write_to_bytes().ok()?;
        let mut header = MessageHeader::from(header);
        header.length = u32::try_from(payload.len()).ok()?;
        let mut frame = Vec::<u8>::from(header);
        frame.extend(payload);
        Some(frame)
    }
}

/// True if a request begins with the name of this service.
fn names(request: &[u8], service: &str) -> bool {
    match request {
        [SERVICE_TAG, length, rest @ ..] => {
            usize::from(*length) == service.len() && rest.starts_with(service.as_bytes())
        }
        _ => false,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Requests<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.passing == 0 {
            ready!(this.poll_frame(context))?;
        }
        let size = buffer.remaining().min(this.passing);
        let mut count = size.min(this.frame.len());
        if count > 0 {
            buffer.put_slice(&this.frame[..count]);
            this.frame.drain(..count);
        } else {
            let mut limited = ReadBuf::new(buffer.initialize_unfilled_to(size));
            ready!(Pin::new(&mut this.socket).poll_read(context, &mut limited))?;
            count = limited.filled().len();
            buffer.advance(count);
        }
        this.passing -= count;
        if this.passing == 0 {
            // An idle connection has no memory for a frame.
            this.frame = Vec::new();
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

    /// The input of ttrpc, for the input of a socket that arrives in pieces of this size.
    fn read(input: &[u8], piece: usize) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (socket, mut client) = tokio::io::duplex(piece);
            let mut connection = Requests::of(socket, Arc::from(["known".to_owned()]));
            let mut output = Vec::new();
            let (sent, _) = tokio::join!(
                async move { client.write_all(input).await },
                connection.read_to_end(&mut output)
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
            (any::<u32>(), bytes()).prop_map(|(stream, payload)| {
                let frame = frame(1, stream, &request("known", "Method", &payload));
                (frame.clone(), frame)
            }),
            ("[a-j.]{0,150}", any::<u32>(), bytes()).prop_map(|(service, stream, payload)| {
                (
                    frame(1, stream, &request(&service, "Method", &payload)),
                    frame(1, stream, &request(V3, &format!("{service}/Method"), b"")),
                )
            }),
        ]
    }

    proptest! {
        #[test]
        fn only_requests_for_unknown_services_change(
            frames in prop::collection::vec(any_frame(), 0..6),
            piece in 1..64_usize,
            end in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let (mut input, mut expected) = (Vec::new(), Vec::new());
            for (sent, arrives) in frames {
                input.extend(sent);
                expected.extend(arrives);
            }
            // A frame that is cut off.
            input.extend(&end);
            expected.extend(&end);
            prop_assert_eq!(read(&input, piece), expected);
        }
    }

    /// ttrpc refuses a frame above its limit and reads the next frame.
    #[test]
    fn a_frame_above_the_limit_passes() {
        let long = vec![10; MESSAGE_LENGTH_MAX + 1];
        let input = [frame(1, 1, &long), frame(1, 3, &request("other", "M", b""))].concat();
        let expected = [
            frame(1, 1, &long),
            frame(1, 3, &request(V3, "other/M", b"")),
        ]
        .concat();
        assert!(read(&input, 4096) == expected);
    }

    #[test]
    fn bytes_that_are_no_request_pass() {
        let input = frame(1, 1, b"\xff\xff\xff");
        assert_eq!(read(&input, 7), input);
    }
}
