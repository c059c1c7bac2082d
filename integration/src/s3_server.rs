//! An S3 server whose buckets are folders: s3s-fs, which `make refresh-apps` builds. It checks the
//! signatures of requests.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result};

use crate::node::Node;
use crate::privilege::program;
use crate::waiting::until;

const KEY: &str = "key-of-a-story";
const SECRET: &str = "secret-of-a-story";

/// A running server. Drop kills the server.
#[derive(Debug)]
pub struct S3Server {
    process: Child,
    address: SocketAddr,
}

impl S3Server {
    /// Serves each folder of a folder as a bucket.
    pub fn start(node: &Node, buckets: &Path) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
        let address = listener.local_addr()?;
        drop(listener);
        let program = program("s3s-fs").context("no s3s-fs: make refresh-apps")?;
        let mut command = node.command(program)?;
        command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
        command.args(["--access-key", KEY, "--secret-key", SECRET]);
        let process = command.arg(buckets).spawn().context("start s3s-fs")?;
        let server = Self { process, address };
        until("the S3 server listens", || {
            Ok(TcpStream::connect(address).is_ok())
        })?;
        Ok(server)
    }

    /// The address of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The variables in which s3fs expects the key.
    pub fn credentials(&self) -> [(&'static str, &'static str); 2] {
        [("AWSACCESSKEYID", KEY), ("AWSSECRETACCESSKEY", SECRET)]
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
