//! bindguard's programs, and the runtime behind them.

use std::path::Path;

use bindguard_operator::doctor::{self, Point, ProgramSeen};
use bindguard_operator::pods::Pods;
use bindguard_sys::kernel_features;

use super::find;
use crate::time_limits::output_of;

/// The point on them. `runtime`: the OCI runtime that the config names; `pods`: those of the node.
pub fn point(runtime: &Path, pods: &Pods) -> Point {
    // The shim searches its own folder for the wrapper; so does this check.
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    let version = |program: &Path, words: &[&str]| {
        let said = output_of(program, words).unwrap_or_else(|error| format!("{error:#}"));
        said.lines()
            .find(|line| !line.trim().is_empty())
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let shim = find(Path::new("containerd-shim-bindguard-v2"), beside);
    let shim = ProgramSeen {
        name: "containerd-shim-bindguard-v2".to_owned(),
        found: shim.map(|path| (path.display().to_string(), shims_version(&path))),
    };
    let wrapper = ProgramSeen {
        name: "bindguard-runtime".to_owned(),
        // It passes a version request to the runtime, so its version is the runtime's.
        found: find(Path::new("bindguard-runtime"), beside)
            .map(|path| (path.display().to_string(), String::new())),
    };
    let runtime = ProgramSeen {
        name: runtime.display().to_string(),
        found: find(runtime, None)
            .map(|path| (path.display().to_string(), version(&path, &["--version"]))),
    };
    doctor::programs(
        env!("CARGO_PKG_VERSION"),
        &[shim, wrapper],
        &runtime,
        &kernel_features().release,
        &pods.by_shim_version(),
    )
}

/// The whole output: the version is on a line of its own.
fn shims_version(path: &Path) -> String {
    let said = output_of(path, &["-v"]).unwrap_or_else(|error| format!("{error:#}"));
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}
