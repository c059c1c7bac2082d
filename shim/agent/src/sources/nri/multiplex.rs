//! Frames: several connections over a socket.
//!
//! A frame is the connection's number and the payload's length, both u32 in big endian, then the
//! payload. The runtime has a connection for its requests and a connection for its answers
//! (`pkg/net/multiplex`).

use std::io::{self, ErrorKind, Read, Write};

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
    let mut header = [0; 8];
    let started = loop {
        match stream.read(&mut header[..1]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => break read? == 1,
        }
    };
    if !started {
        return Ok(None);
    }
    stream.read_exact(&mut header[1..])?;
    let [c0, c1, c2, c3, l0, l1, l2, l3] = header;
    let (connection, length) = (
        u32::from_be_bytes([c0, c1, c2, c3]),
        u32::from_be_bytes([l0, l1, l2, l3]),
    );
    if length > MAX_RECEIVED {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("a frame of {length} bytes, the limit is {MAX_RECEIVED}"),
        ));
    }
    // Memory for the bytes that arrive, not for the announced number.
    let mut payload = Vec::new();
    stream.take(length.into()).read_to_end(&mut payload)?;
    match payload.len() == length as usize {
        true => Ok(Some(Frame {
            connection,
            payload,
        })),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
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
