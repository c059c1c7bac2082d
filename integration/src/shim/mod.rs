//! The shim's own socket: a story sends the requests that neither `ctr` nor the CRI can send.
//!
//! ```text
//!   Bundle ──Shim::start──► containerd-shim-bindguard-v2 ◄── Client (ttrpc)     the story in containerd's place
//!   containerd's bundle ──Shim::of──────────┘                                   the story beside containerd
//! ```
//! Events go to the node's containerd in both cases. A client's event loop runs on the calling
//! thread and only during a request, so that no thread outlives the node. A drop of the client
//! closes the connection.

mod bundle;
mod client;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::shim::oci::Options;
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use serde_json::Value;

pub use self::bundle::{Bundle, spec};
pub use self::client::{Client, code};

use crate::node::{Node, SOCKET};
use crate::process::{Finished, LIMIT, run_with_bytes};
use crate::programs::{SHIM, STOCK_SHIM};

#[derive(Clone, Debug)]
pub struct Shim {
    socket: PathBuf,
}

impl Shim {
    /// The shim that serves the container of this bundle. containerd 2 keeps the answer of `start`;
    /// older bundles have an `address` file.
    pub fn of(bundle: &Path) -> Result<Self> {
        if let Ok(answer) = fs::read_to_string(bundle.join("bootstrap.json")) {
            let answer: Value = serde_json::from_str(&answer).context("parse bootstrap.json")?;
            return Self::at(answer["address"].as_str().unwrap_or_default());
        }
        let file = bundle.join("address");
        let address =
            fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Self::at(&address)
    }

    /// The shim of a container that the node's containerd started.
    pub fn of_container(node: &Node, id: &str) -> Result<Self> {
        Self::of(
            &Path::new("/run/containerd/io.containerd.runtime.v2.task")
                .join(node.name())
                .join(id),
        )
    }

    /// Runs `start` for a bundle, as containerd up to 2.2 does.
    pub fn start(node: &Node, bundle: &Bundle, options: &Options) -> Result<Self> {
        let any = options_any(options)?
            .write_to_bytes()
            .context("encode the options")?;
        Self::at(&run_with_bytes(verb(node, bundle, "start")?, &any, LIMIT)?.success()?)
    }

    /// Runs `start` for a bundle, as containerd does since 2.3: with these parameters plus the
    /// bundle's names.
    pub fn start_with(
        node: &Node,
        bundle: &Bundle,
        params: BootstrapParams,
    ) -> Result<(Self, BootstrapResult)> {
        let params = params_of(node, bundle, params)?;
        let said = run_with_bytes(verb(node, bundle, "start")?, &params, LIMIT)?.success()?;
        let result = BootstrapResult::parse_from_bytes(said.as_bytes());
        let result = result.with_context(|| format!("{said:?} is no BootstrapResult"))?;
        Ok((Self::at(&result.address)?, result))
    }

    /// Runs the stock shim's `start` for a bundle. That of containerd 2.0 to 2.2 ignores the
    /// parameters and answers with JSON. Its server waits for a reader of its log, which is here as
    /// long as the server writes.
    pub fn start_stock(node: &Node, bundle: &Bundle) -> Result<Self> {
        let log = bundle.path().join("log");
        thread::spawn(move || io::copy(&mut File::open(log)?, &mut io::sink()));
        let params = params_of(node, bundle, BootstrapParams::default())?;
        let answer = run_with_bytes(verb_of(STOCK_SHIM, node, bundle, "start")?, &params, LIMIT)?
            .success()?;
        if let Ok(result) = BootstrapResult::parse_from_bytes(answer.as_bytes()) {
            return Self::at(&result.address);
        }
        let answer: Value =
            serde_json::from_str(&answer).with_context(|| format!("{answer:?} is no JSON"))?;
        Self::at(answer["address"].as_str().unwrap_or_default())
    }

    /// Runs `start` for a bundle with this input.
    pub fn start_with_bytes(node: &Node, bundle: &Bundle, input: &[u8]) -> Result<Finished> {
        run_with_bytes(verb(node, bundle, "start")?, input, LIMIT)
    }

    /// Runs `delete` for a bundle, as containerd does when its shim is gone.
    pub fn delete(node: &Node, bundle: &Bundle) -> Result<()> {
        run_with_bytes(verb(node, bundle, "delete")?, &[], LIMIT)?
            .success()
            .map(drop)
    }

    /// The shim that serves on this socket.
    pub fn at_socket(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn connect(&self) -> Result<Client> {
        Client::connect(&self.socket)
    }

    fn at(address: &str) -> Result<Self> {
        let path = address.trim().strip_prefix("unix://");
        ensure!(path.is_some(), "{address:?} is no address of a shim");
        Ok(Self {
            socket: path.unwrap_or_default().into(),
        })
    }
}

fn params_of(node: &Node, bundle: &Bundle, params: BootstrapParams) -> Result<Vec<u8>> {
    let (instance_id, namespace) = (bundle.id().to_owned(), node.name().to_owned());
    let params = BootstrapParams {
        instance_id,
        namespace,
        containerd_grpc_address: SOCKET.to_owned(),
        ..params
    };
    params.write_to_bytes().context("encode the parameters")
}

fn verb(node: &Node, bundle: &Bundle, verb: &str) -> Result<Command> {
    verb_of(SHIM, node, bundle, verb)
}

fn verb_of(program: &str, node: &Node, bundle: &Bundle, verb: &str) -> Result<Command> {
    let mut command = node.command(node.programs().join(program))?;
    command.env("TTRPC_ADDRESS", format!("{SOCKET}.ttrpc"));
    command.args([
        "-namespace",
        node.name(),
        "-address",
        SOCKET,
        "-publish-binary",
        "none",
    ]);
    command
        .args(["-id", bundle.id(), verb])
        .current_dir(bundle.path());
    Ok(command)
}

/// As containerd sends them.
pub fn options_any(options: &Options) -> Result<Any> {
    let value = options.write_to_bytes().context("encode the options")?;
    Ok(Any {
        type_url: "containerd.runc.v1.Options".to_owned(),
        value,
        ..Default::default()
    })
}
