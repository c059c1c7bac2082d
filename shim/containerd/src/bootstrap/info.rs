//! `-info` and `-v`: the features and the version of this shim.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};

use super::stdin;
use crate::runtime::look_up;
use crate::step::failed;

/// The revision of the sources; the Makefile sets it.
const REVISION: Option<&str> = option_env!("BINDGUARD_REVISION");

/// The name under which Go's containerd registers the runtime spec's features.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Answers with a RuntimeInfo. containerd 2.x requests it above all to learn whether the runtime
/// can id-map mounts.
pub(crate) fn info() -> Result<(), Box<dyn Error>> {
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
pub(crate) fn version() {
    let revision = REVISION
        .filter(|revision| !revision.is_empty())
        .unwrap_or("unknown");
    println!(
        "{SHIM}:\n  Version:  {}\n  Revision: {revision}",
        env!("CARGO_PKG_VERSION")
    );
}
