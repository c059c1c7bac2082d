//! bindguard's programs, and the runtime behind them.

use std::path::Path;

use bindguard_core::doctor::{self, Point, ProgramSeen};

use super::find;
use crate::ask::said;

/// The point on them. `runtime`: the OCI runtime that the config names.
pub fn point(runtime: &Path) -> Point {
    // The shim looks for the wrapper beside itself; so is the command line's own folder looked into.
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    let version = |program: &Path, words: &[&str]| {
        let said = said(program, words).unwrap_or_else(|why| why);
        said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned()
    };
    let shim = find(Path::new("containerd-shim-bindguard-v2"), beside);
    let shim = ProgramSeen {
        name: "containerd-shim-bindguard-v2".to_owned(),
        found: shim.map(|path| (path.display().to_string(), shims_version(&path))),
    };
    let wrapper = ProgramSeen {
        name: "bindguard-runtime".to_owned(),
        // Its version is the runtime's: it passes that question on.
        found: find(Path::new("bindguard-runtime"), beside).map(|path| (path.display().to_string(), String::new())),
    };
    let runtime = ProgramSeen {
        name: runtime.display().to_string(),
        found: find(runtime, None).map(|path| (path.display().to_string(), version(&path, &["--version"]))),
    };
    doctor::programs(env!("CARGO_PKG_VERSION"), &[shim, wrapper], &runtime)
}

/// The whole of what it says, for its version stands on a line of its own.
fn shims_version(path: &Path) -> String {
    let said = said(path, &["-v"]).unwrap_or_else(|why| why);
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}
