//! The part of ksmbd.mountd(8) that configures the kernel's SMB server: the accounts that may log
//! in, and the directory of a share.
//!
//! Generic netlink, see netlink(7); the messages are those of the kernel's
//! fs/smb/server/ksmbd_netlink.h.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket,
};
use nix::sys::time::TimeVal;

// The family of families: GENL_ID_CTRL, and the fields of a request to it.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_NAME: u16 = 2;
const FAMILY_ID: u16 = 1;

// Events. The number of an answer is the request's number plus one.
const STARTING_UP: u8 = 2;
const LOGIN: u8 = 4;
const SHARE_CONFIG: u8 = 6;
const TREE_CONNECT: u8 = 8;

const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const ERROR: u16 = 2;
const HEADERS: usize = 20;

pub const USER: &str = "bindguard";
pub const PASSWORD: &str = "password";
/// MD4 of that password in UTF-16.
const HASH: [u8; 16] = *b"\x88\x46\xf7\xea\xee\x8f\xb1\x17\xad\x06\xbd\xd8\x30\xb7\x58\x6c";

/// Answers the kernel's requests, until it is dropped.
pub struct Mountd {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mountd {
    /// Has the kernel's server begin, with `folder` as its only share.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let socket = Socket::to("SMBD_GENL")?;
        // No flags; signing as the client likes it; whichever versions both know.
        let begin = Message::default().number(0).number(2).zeros(16 + 16);
        let begin = begin
            .text("TESTS", 16)
            .text("WORKGROUP", 64)
            .text("tests", 64);
        // The port; the most files that are open; the kernel's own limits; and no list of
        // interfaces.
        let begin = begin
            .short(445)
            .short(0)
            .number(0)
            .number(10_000)
            .zeros(4 * 4)
            .zeros(4 * 3);
        let begin = begin.zeros(4 * 3).zeros(4 * 126).number(0);
        socket.send(
            STARTING_UP,
            STARTING_UP.into(),
            &begin.0,
            REQUEST | ACKNOWLEDGE,
        )?;
        socket.receive()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let (stop, folder) = (Arc::clone(&is_over), folder.to_str().unwrap().to_owned());
        let thread = thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                match socket.receive() {
                    Ok((event, request)) => answer(&socket, event, &request, &folder),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => panic!("receive from the kernel's SMB server: {error}"),
                }
            }
        });
        Ok(Self {
            is_over,
            thread: Some(thread),
        })
    }
}

impl Drop for Mountd {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Every client with the password may do everything, in every share that it requests.
fn answer(socket: &Socket, event: u8, request: &[u8], folder: &str) {
    // Every request begins with a number of its own.
    let answer = || Message(request[4..8].to_vec());
    let message = match event {
        LOGIN => answer()
            .zeros(8)
            .text(USER, 48)
            .short(1)
            .short(HASH.len() as u16)
            .bytes(&HASH, 18)
            .zeros(2 + 64),
        SHARE_CONFIG => {
            let is_pipe = request[8..].starts_with(b"IPC$\0");
            let path = if is_pipe {
                Vec::new()
            } else {
                [folder.as_bytes(), b"\0"].concat()
            };
            let flags = if is_pipe {
                1 | 1 << 8
            } else {
                1 | 1 << 2 | 1 << 7
            };
            let masks = answer()
                .number(flags)
                .short(0o777)
                .short(0o777)
                .zeros(4)
                .short(u16::MAX)
                .short(u16::MAX);
            masks
                .zeros(64 + 4 * 111)
                .number(path.len() as u32)
                .number(0)
                .bytes(&path, path.len())
        }
        TREE_CONNECT => answer().short(0).short(1 << 2).zeros(64),
        _ => return,
    };
    socket
        .send(event + 1, u16::from(event) + 1, &message.0, REQUEST)
        .unwrap();
}

/// A C struct, field after field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_ne_bytes());
        self
    }

    fn short(mut self, number: u16) -> Self {
        self.0.extend(number.to_ne_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8], length: usize) -> Self {
        let end = self.0.len() + length;
        self.0.extend(bytes);
        self.0.resize(end, 0);
        self
    }

    fn text(self, text: &str, length: usize) -> Self {
        self.bytes(text.as_bytes(), length)
    }

    fn zeros(self, length: usize) -> Self {
        self.bytes(&[], length)
    }
}

/// A generic netlink socket that speaks with a single family.
struct Socket {
    socket: OwnedFd,
    family: u16,
}

impl Socket {
    fn to(family: &str) -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkGeneric,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::new(0, 200_000))?;
        let mut this = Self {
            socket,
            family: CONTROL,
        };
        this.send(
            GET_FAMILY,
            FAMILY_NAME,
            &[family.as_bytes(), b"\0"].concat(),
            REQUEST,
        )?;
        let (_, mut attributes) = this.receive()?;
        while attributes.len() >= 4 {
            let [length, kind] =
                [0, 2].map(|at| u16::from_ne_bytes([attributes[at], attributes[at + 1]]));
            if kind == FAMILY_ID {
                this.family = u16::from_ne_bytes([attributes[4], attributes[5]]);
                return Ok(this);
            }
            attributes.drain(..usize::from(length).next_multiple_of(4));
        }
        Err(ErrorKind::NotFound.into())
    }

    fn send(&self, command: u8, attribute: u16, payload: &[u8], flags: u16) -> io::Result<()> {
        let length = 4 + payload.len();
        let padded = length.next_multiple_of(4);
        let message = Message::default()
            .number((HEADERS + padded) as u32)
            .short(self.family)
            .short(flags)
            .zeros(8);
        let message = message
            .bytes(&[command, 1], 4)
            .short(length as u16)
            .short(attribute)
            .bytes(payload, padded - 4);
        send(self.socket.as_raw_fd(), &message.0, MsgFlags::empty())?;
        Ok(())
    }

    /// The next message's command and attributes.
    fn receive(&self) -> io::Result<(u8, Vec<u8>)> {
        let mut buffer = vec![0; 16384];
        let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        buffer.truncate(length);
        if u16::from_ne_bytes([buffer[4], buffer[5]]) == ERROR {
            let number = i32::from_ne_bytes(buffer[16..20].try_into().unwrap());
            return if number == 0 {
                Ok((0, Vec::new()))
            } else {
                Err(io::Error::from_raw_os_error(-number))
            };
        }
        Ok((buffer[16], buffer.split_off(HEADERS)))
    }
}
