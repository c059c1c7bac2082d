//! bindguard's programs, and the runtime behind them.

use std::env;
use std::path::Path;

use anyhow::Result;
use bindguard_core::program_names::{SELF_TEST, SHIM, WRAPPER};
use bindguard_installer::running::containerds;
use bindguard_operator::doctor::{self, Point, ProgramSeen};
use bindguard_operator::pods::Pods;
use bindguard_operator::root_program::{Failed, RootProgram};
use bindguard_sys::kernel_features;

use crate::show::NODE_ROOT;

/// The point on them. `runtime`: the OCI runtime that the config names; `pods`: those of the node.
pub fn point(runtime: &Path, pods: &Pods) -> Point {
    // The shim searches its own folder for the wrapper; so does this check.
    // In a pod that folder is the image's.
    let own = env::current_exe().ok();
    let own = own.filter(|_| NODE_ROOT.get().is_none());
    let beside = own.as_deref().and_then(Path::parent);
    let shim = seen(Path::new(SHIM), beside, |shim| {
        words_of(shim.output(&["-v"]))
    });
    // It passes a version request to the runtime, so that version is the runtime's. An older wrapper
    // also passes the self-test to the runtime, which refuses the argument.
    let wrapper = seen(Path::new(WRAPPER), beside, |wrapper| {
        match wrapper.output(&[SELF_TEST]) {
            Err(error) if error.is::<Failed>() => "of a version without a self-test".to_owned(),
            said => words_of(said),
        }
    });
    let runtime = runtime_seen(runtime);
    let (shim, wrapper, runtime) = match (shim, wrapper, runtime) {
        (Ok(shim), Ok(wrapper), Ok(runtime)) => (shim, wrapper, runtime),
        (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => {
            return Point::failed("programs", format!("{error:#}"), "bindguard config show");
        }
    };
    doctor::programs(
        env!("CARGO_PKG_VERSION"),
        &[shim, wrapper],
        &runtime,
        &kernel_features().release,
        &pods.by_shim_version(),
    )
}

/// The OCI runtime as containerd's shims find it. The containerd of k3s, RKE2, k0s and MicroK8s has
/// folders on its `PATH` that no shell has.
fn runtime_seen(name: &Path) -> Result<ProgramSeen> {
    let version = |runtime: &RootProgram| first_line(runtime.output(&["--version"]));
    for containerd in containerds().iter().filter(|_| name.is_relative()) {
        let path = containerd.search_path().unwrap_or_default();
        let folders = env::split_paths(&path).filter(|folder| folder.is_absolute());
        for folder in folders {
            let found = seen(&folder.join(name), None, version)?;
            if found.found.is_some() {
                return Ok(found);
            }
        }
    }
    seen(name, None, version)
}

fn seen(
    name: &Path,
    beside: Option<&Path>,
    version: impl FnOnce(&RootProgram) -> String,
) -> Result<ProgramSeen> {
    let found = RootProgram::find(name, beside)?;
    Ok(ProgramSeen {
        name: name.display().to_string(),
        found: found.map(|found| (found.path().display().to_string(), version(&found))),
    })
}

fn first_line(said: Result<String>) -> String {
    let said = said.unwrap_or_else(|error| format!("{error:#}"));
    let line = said.lines().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().to_owned()
}

/// The whole output: the version is on a line of its own.
fn words_of(said: Result<String>) -> String {
    let said = said.unwrap_or_else(|error| format!("{error:#}"));
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}
