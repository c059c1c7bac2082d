//! ttrpc messages on a multiplexed connection.
//!
//! A message is the length and the stream as big-endian u32, a byte for the kind, a byte for flags,
//! and the payload (PROTOCOL.md of containerd/ttrpc). The crate `ttrpc` serves whole sockets;
//! through its custom transport it would bring a second protobuf library and vsock into the agent,
//! for two kinds of messages.

use std::io::{self, ErrorKind, Read, Write};

use anyhow::{Context, Result, ensure};
use prost::Message as _;
use prost::bytes::{Buf, Bytes, BytesMut};

const HEADER: usize = 10;
/// The limit of the protocol.
const MAX_MESSAGE: usize = 4 << 20;
/// containerd 1.7 also sends larger requests. Their payload is passed over: without an answer the
/// runtime would go on without the plugin.
const MAX_PASSED_OVER: usize = 64 << 20;
/// The first bytes of a request have its service and its method.
const NAMES: usize = 256;

const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    /// The service, with its package.
    #[prost(string, tag = "1")]
    pub service: String,
    #[prost(string, tag = "2")]
    pub method: String,
    /// The method's own message: a part of the bytes of the connection.
    #[prost(bytes = "bytes", tag = "3")]
    pub payload: Bytes,
}

/// The answer to a call.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Response {
    /// The error; absent if the call succeeded.
    #[prost(message, optional, tag = "1")]
    pub status: Option<RpcStatus>,
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
}

/// `google.rpc.Status`
#[derive(Clone, PartialEq, prost::Message)]
pub struct RpcStatus {
    /// The code of gRPC; 0 is no error.
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub message: String,
}

impl RpcStatus {
    /// The state of the node forbids it.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// There is no such method.
    pub const UNIMPLEMENTED: i32 = 12;

    /// Policy refuses the container, for this reason.
    pub fn refused(reason: &str) -> Self {
        Self {
            code: Self::FAILED_PRECONDITION,
            message: format!("bindguard refuses the container: {reason}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    Request(u32, Request),
    Response(u32, Response),
}

impl Message {
    /// The bytes of the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (stream, kind, payload) = match self {
            Self::Request(stream, request) => (stream, REQUEST, request.encode_to_vec()),
            Self::Response(stream, response) => (stream, RESPONSE, response.encode_to_vec()),
        };
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        bytes.extend(payload);
        bytes
    }
}

/// The bytes of a connection that are not a whole message yet.
#[derive(Debug, Default)]
pub struct Incoming {
    bytes: BytesMut,
    /// The number of bytes to pass over, and the message that they are a part of.
    passed_over: usize,
    too_large: Option<Message>,
}

impl Incoming {
    /// Adds the payload of a frame. A message can begin and end anywhere in it.
    pub fn push(&mut self, payload: &[u8]) {
        let (passed_over, rest) = payload.split_at(self.passed_over.min(payload.len()));
        self.passed_over -= passed_over.len();
        self.bytes.extend_from_slice(rest);
    }

    /// Takes the next whole message. Streaming messages, which NRI does not use, are passed over. A
    /// request beyond the protocol's limit has a payload that cannot be decoded.
    ///
    /// # Errors
    /// If the bytes are not messages. Then the connection is of no more use.
    pub fn next_message(&mut self) -> Result<Option<Message>> {
        if self.passed_over > 0 {
            return Ok(None);
        }
        if let Some(message) = self.too_large.take() {
            return Ok(Some(message));
        }
        while let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER>() {
            let [l0, l1, l2, l3, s0, s1, s2, s3, kind, _flags] = *header;
            let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
            let stream = u32::from_be_bytes([s0, s1, s2, s3]);
            ensure!(
                length <= MAX_MESSAGE || (length <= MAX_PASSED_OVER && kind == REQUEST),
                "a message of {length} bytes, the limit is {MAX_PASSED_OVER}"
            );
            if length > MAX_MESSAGE {
                let Some(names) = rest.get(..NAMES) else {
                    return Ok(None);
                };
                let mut request = Request::default();
                // An error: the payload goes on behind these bytes.
                let _ = request.merge(names);
                request.payload = Bytes::from_static(&[u8::MAX]);
                self.too_large = Some(Message::Request(stream, request));
                self.passed_over = HEADER + length;
                let bytes = std::mem::take(&mut self.bytes);
                self.push(&bytes);
                return self.next_message();
            }
            if rest.len() < length {
                return Ok(None);
            }
            self.bytes.advance(HEADER);
            let payload = self.bytes.split_to(length).freeze();
            // A message may have megabytes: they are freed with it.
            self.bytes = BytesMut::from(&self.bytes[..]);
            let message = match kind {
                REQUEST => Request::decode(payload).map(|it| Message::Request(stream, it)),
                RESPONSE => Response::decode(payload).map(|it| Message::Response(stream, it)),
                _ => continue,
            };
            return message.map(Some).context("decode a message");
        }
        Ok(None)
    }
}

// Frames: several connections over a socket.
//
// A frame is the connection's number and the payload's length, both u32 in big endian, then the
// payload. The runtime has a connection for its requests and a connection for its answers
// (`pkg/net/multiplex`).

/// The runtime calls the plugin on this connection.
pub const TO_PLUGIN: u32 = 1;
/// The plugin calls the runtime on this connection.
pub const TO_RUNTIME: u32 = 2;

/// The runtime's limit (`maxPayloadSize`). A pod that the API server accepts leads to requests of at
/// most 9 MiB, which containerd 1.7 sends in spite of ttrpc's limit.
const MAX_RECEIVED: u32 = 16 << 20;

/// The runtime reads a frame into one buffer, and closes the connection if the frame is larger. The
/// runtime's smallest buffer has the size of Go's bufio buffer.
const MAX_SENT: usize = 4096;

/// Part of a connection's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The number of its connection.
    pub connection: u32,
    /// The bytes.
    pub payload: Vec<u8>,
}

/// Reads the next frame; `None` at the end of the stream.
///
/// # Errors
/// If the stream fails or ends inside a frame, or the frame is too large.
pub fn read_frame(stream: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut header = Vec::with_capacity(8);
    stream.take(8).read_to_end(&mut header)?;
    if header.is_empty() {
        return Ok(None);
    }
    let header = <[u8; 8]>::try_from(header).map_err(|_| ErrorKind::UnexpectedEof)?;
    let [c0, c1, c2, c3, l0, l1, l2, l3] = header;
    let connection = u32::from_be_bytes([c0, c1, c2, c3]);
    let length = u32::from_be_bytes([l0, l1, l2, l3]);
    if length > MAX_RECEIVED {
        let why = format!("a frame of {length} bytes, the limit is {MAX_RECEIVED}");
        return Err(io::Error::new(ErrorKind::InvalidData, why));
    }
    // Memory for the bytes that arrive, not for the announced number.
    let mut payload = Vec::new();
    stream.take(length.into()).read_to_end(&mut payload)?;
    if payload.len() < length as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame {
        connection,
        payload,
    }))
}

/// Writes bytes to a connection.
///
/// # Errors
/// If the stream fails.
pub fn write_frames(stream: &mut impl Write, connection: u32, bytes: &[u8]) -> io::Result<()> {
    let mut frames = Vec::with_capacity(bytes.len() + 8);
    for payload in bytes.chunks(MAX_SENT) {
        frames.extend_from_slice(&connection.to_be_bytes());
        frames.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        frames.extend_from_slice(payload);
    }
    stream.write_all(&frames)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn messages() -> impl Strategy<Value = Message> {
        (
            any::<u32>(),
            any::<bool>(),
            "[a-zA-Z.]{0,20}",
            vec(any::<u8>(), 0..300),
        )
            .prop_map(|(stream, is_request, text, payload)| match is_request {
                true => Message::Request(
                    stream,
                    Request {
                        service: text.clone(),
                        method: text,
                        payload: payload.into(),
                    },
                ),
                false => Message::Response(
                    stream,
                    Response {
                        status: Some(RpcStatus {
                            code: 9,
                            message: text,
                        }),
                        payload,
                    },
                ),
            })
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_however_their_bytes_are_cut(sent in vec(messages(), 0..6), cut in 1..200_usize) {
            let bytes: Vec<u8> = sent.iter().flat_map(Message::to_bytes).collect();
            let (mut incoming, mut received) = (Incoming::default(), Vec::new());
            for part in bytes.chunks(cut) {
                incoming.push(part);
                while let Some(message) = incoming.next_message().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn any_bytes_are_messages_or_an_error(bytes in vec(any::<u8>(), 0..300)) {
            let mut incoming = Incoming::default();
            incoming.push(&bytes);
            while let Ok(Some(_)) = incoming.next_message() {}
        }
    }

    /// As from containerd 1.7 for a pod with 33,000 mounts.
    #[test]
    fn a_request_beyond_the_limit_has_its_method_and_no_payload() {
        let request = |payload: usize| Request {
            service: "nri.pkg.api.v1alpha1.Plugin".to_owned(),
            method: "CreateContainer".to_owned(),
            payload: vec![0; payload].into(),
        };
        let sent = [
            Message::Request(3, request(MAX_MESSAGE)),
            Message::Request(5, request(1)),
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(Message::to_bytes).collect();
        for cut in [100, 4096, MAX_MESSAGE, bytes.len()] {
            let (mut incoming, mut received) = (Incoming::default(), Vec::new());
            for part in bytes.chunks(cut) {
                incoming.push(part);
                while let Some(message) = incoming.next_message().unwrap() {
                    received.push(message);
                }
            }
            let [Message::Request(3, first), second] = received.as_slice() else {
                panic!("{} messages", received.len())
            };
            assert_eq!(first.method, "CreateContainer");
            assert!(Response::decode(first.payload.clone()).is_err());
            assert_eq!(*second, sent[1]);
        }
    }

    #[test]
    fn a_streaming_message_is_passed_over() {
        let request = Message::Request(1, Request::default());
        let mut incoming = Incoming::default();
        incoming.push(&[0, 0, 0, 2, 0, 0, 0, 7, 3, 0, b'x', b'y']);
        incoming.push(&request.to_bytes());
        assert_eq!(incoming.next_message().unwrap(), Some(request));
    }
}

#[cfg(test)]
mod multiplex_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn written_bytes_are_read_in_order_and_each_frame_fits_the_runtimes_buffer(
            bytes in vec(any::<u8>(), 0..20_000), connection: u32,
        ) {
            let mut stream = Vec::new();
            write_frames(&mut stream, connection, &bytes).unwrap();
            let (mut stream, mut read) = (stream.as_slice(), Vec::new());
            while let Some(frame) = read_frame(&mut stream).unwrap() {
                prop_assert_eq!(frame.connection, connection);
                prop_assert!(frame.payload.len() <= MAX_SENT);
                read.extend(frame.payload);
            }
            prop_assert_eq!(read, bytes);
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let mut stream = bytes.as_slice();
            while let Ok(Some(frame)) = read_frame(&mut stream) {
                prop_assert!(frame.payload.len() + 8 <= bytes.len());
            }
        }
    }

    #[test]
    fn the_end_of_the_stream_is_an_error_only_inside_a_frame() {
        let mut frame = Vec::new();
        write_frames(&mut frame, TO_PLUGIN, b"payload").unwrap();
        assert_eq!(read_frame(&mut [].as_slice()).unwrap(), None);
        for end in 1..frame.len() {
            assert_eq!(
                read_frame(&mut &frame[..end]).unwrap_err().kind(),
                ErrorKind::UnexpectedEof,
                "{end}"
            );
        }
    }

    #[test]
    fn a_frame_beyond_the_limit_is_refused_before_it_is_read() {
        let header = [0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(
            read_frame(&mut header.as_slice()).unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }
}
