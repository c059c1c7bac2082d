//! The verbs that containerd runs besides the server: short-lived processes that answer on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…, or a BootstrapResult
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    the features of shim and runtime (containerd 2.x)   → RuntimeInfo
//!   -v       the version, for people
//! ```
//! [`answer`] lists the answers to `start` for each containerd.

mod claim;
mod delete;
mod start;
mod stdin;

use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE};
use claim::hash;
pub use claim::remove as remove_socket;
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
pub use delete::delete;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
pub use start::start;

use crate::runtime::look_up;
use crate::step::failed;

// Addresses: the link of a group, the server's address in a bundle, and containerd's event socket.

/// The directory all of containerd's shims put their sockets in.
pub const SOCKET_DIRECTORY: &str = "/run/containerd/s";
/// containerd 1.x reads this file in a bundle after a restart: it has the server's address.
pub const ADDRESS_FILE: &str = "address";

/// The link to a group's server: a hash of containerd's address, namespace and group, since paths
/// of sockets are short. Go's shim binds its socket at the same path, so a start of either shim
/// finds the group's server.
pub fn link_of_group(directory: &Path, containerd: &str, namespace: &str, group: &str) -> PathBuf {
    let key = Path::new(containerd).join(namespace).join(group);
    directory.join(hash(key.as_os_str().as_encoded_bytes()))
}

/// The address of a socket.
pub fn address_of_socket(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

/// Writes the address into the bundle, which is the current directory.
pub fn write_address(address: &str) -> io::Result<()> {
    crate::bundle::write_beside(Path::new(ADDRESS_FILE), address.as_bytes())
}

/// The socket that a bundle names.
pub fn socket_of_bundle(bundle: &Path) -> Option<PathBuf> {
    let address = fs::read_to_string(bundle.join(ADDRESS_FILE)).ok()?;
    let address = address.trim();
    Some(address.strip_prefix("unix://").unwrap_or(address).into())
}

/// containerd's event socket: the address in the environment, else the fixed path beside
/// containerd's own socket.
pub fn events_address(containerd: &str) -> String {
    match std::env::var("TTRPC_ADDRESS") {
        Ok(address) if !address.is_empty() => address,
        _ => format!("{containerd}.ttrpc"),
    }
}

// `-info` and `-v`: the features and the version of this shim.

/// The revision of the sources; the Makefile sets it.
const REVISION: Option<&str> = option_env!("BINDGUARD_REVISION");

/// The name under which Go's containerd registers the runtime spec's features.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Answers with a RuntimeInfo. containerd 2.x requests it above all to learn whether the runtime
/// can id-map mounts.
pub fn info() -> Result<(), Box<dyn Error>> {
    let (options, any) = stdin::read_options()?;
    let revision = REVISION.unwrap_or_default().to_owned();
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        revision,
        ..Default::default()
    };
    let info = RuntimeInfo {
        name: SHIM_RUNTIME_TYPE.to_owned(),
        version: MessageField::some(version),
        features: MessageField::from_option(features(&options.binary_name)?),
        options: MessageField::from_option(any),
        ..Default::default()
    };
    let answer = info.write_to_bytes().map_err(failed("encode the answer"))?;
    Ok(io::stdout()
        .write_all(&answer)
        .map_err(failed("answer on stdout"))?)
}

/// The output of `runc features`, if it is JSON. Older runtimes have no such verb: then the answer
/// has no features.
fn features(binary: &str) -> io::Result<Option<Any>> {
    let binary = if binary.is_empty() { "runc" } else { binary };
    let program = look_up(binary).ok_or_else(|| {
        let why = format!("find the runtime {binary:?}: no such program");
        io::Error::new(io::ErrorKind::NotFound, why)
    })?;
    Ok(output_of_features(&program).map(|json| Any {
        type_url: FEATURES.to_owned(),
        value: json,
        ..Default::default()
    }))
}

fn output_of_features(program: &Path) -> Option<Vec<u8>> {
    let output = Command::new(program)
        .arg("features")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&output.stdout).is_ok();
    (is_json && output.status.success()).then_some(output.stdout)
}

/// Prints the version for people.
pub fn version() {
    let revision = REVISION
        .filter(|revision| !revision.is_empty())
        .unwrap_or("unknown");
    println!(
        "{SHIM}:\n  Version:  {}\n  Revision: {revision}",
        env!("CARGO_PKG_VERSION")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_has_the_name_of_gos_socket() {
        let link = |namespace| {
            link_of_group(
                Path::new(SOCKET_DIRECTORY),
                "/run/containerd/containerd.sock",
                namespace,
                "abc",
            )
        };
        // sha256("/run/containerd/containerd.sock/k8s.io/abc")
        let name =
            "/run/containerd/s/a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72";
        assert_eq!(link("k8s.io"), Path::new(name));
        assert_ne!(link("moby"), Path::new(name));
    }
}
