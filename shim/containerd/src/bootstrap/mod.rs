//! The verbs that containerd runs besides the server: short-lived processes that answer on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…, or a BootstrapResult
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    the features of shim and runtime (containerd 2.x)   → RuntimeInfo
//!   -v       the version, for people
//! ```

mod claim;
mod delete;
mod start;
mod stdin;

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};

pub use claim::remove as remove_socket;
pub use delete::delete;
pub use start::start;

use crate::runtime::look_up;
use crate::step::failed;
use claim::hash;

/// The directory all of containerd's shims put their sockets in.
const SOCKET_DIRECTORY: &str = "/run/containerd/s";
/// containerd 1.x reads this file in a bundle after a restart: it has the server's address.
const ADDRESS_FILE: &str = "address";

/// The revision of the sources; the Makefile sets it.
const REVISION: Option<&str> = option_env!("BINDGUARD_REVISION");

/// The name under which Go's containerd registers the runtime spec's features.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// The link to a group's server: a hash of containerd's address, namespace and group, since paths
/// of sockets are short. Go's shim binds its socket at the same path, so a start of either shim
/// finds the group's server.
fn link_of_group(directory: &Path, containerd: &str, namespace: &str, group: &str) -> PathBuf {
    let key = Path::new(containerd).join(namespace).join(group);
    directory.join(hash(key.as_os_str().as_encoded_bytes()))
}

/// containerd's event socket: the address in the environment, else the fixed path beside
/// containerd's own socket.
pub fn events_address(containerd: &str) -> String {
    match std::env::var("TTRPC_ADDRESS") {
        Ok(address) if !address.is_empty() => address,
        _ => format!("{containerd}.ttrpc"),
    }
}

/// Answers with a RuntimeInfo. containerd 2.x requests it above all to learn whether the runtime
/// can id-map mounts.
pub fn info() -> Result<(), Box<dyn Error>> {
    let (options, any) = stdin::read_options()?;
    let binary = match options.binary_name.as_str() {
        "" => "runc",
        binary => binary,
    };
    let program =
        look_up(binary).ok_or_else(|| format!("find the runtime {binary:?}: no such program"))?;
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        revision: REVISION.unwrap_or_default().to_owned(),
        ..Default::default()
    };
    let info = RuntimeInfo {
        name: SHIM_RUNTIME_TYPE.to_owned(),
        version: MessageField::some(version),
        features: MessageField::from_option(features(&program)),
        options: MessageField::from_option(any),
        ..Default::default()
    };
    let answer = info.write_to_bytes().map_err(failed("encode the answer"))?;
    let written = io::stdout().write_all(&answer);
    Ok(written.map_err(failed("answer on stdout"))?)
}

/// The output of `runc features`, if it is JSON. Older runtimes have no such verb: then the answer
/// has no features.
fn features(program: &Path) -> Option<Any> {
    let output = Command::new(program)
        .arg("features")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&output.stdout).is_ok();
    (is_json && output.status.success()).then(|| Any {
        type_url: FEATURES.to_owned(),
        value: output.stdout,
        ..Default::default()
    })
}

/// Prints the version for people.
pub fn version() {
    let revision = match REVISION {
        None | Some("") => "unknown",
        Some(revision) => revision,
    };
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
