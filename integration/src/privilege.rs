//! Skipping aloud: a node needs root, and a machine without it must say so instead of passing in
//! silence.

use std::io::Write;
use std::path::PathBuf;

/// Why no node can be made here, if so.
pub fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".into());
    }
    if !has_sys_admin() {
        return Some("no CAP_SYS_ADMIN".into());
    }
    if crate::cgroup_hierarchy::tracking_hierarchy().is_none() {
        return Some("no writable cgroup hierarchy under /sys/fs/cgroup".into());
    }
    None
}

/// Says that a story was skipped, past the test runner's capture of `eprintln!`.
pub fn skipped(why: &str) {
    let name = std::thread::current().name().unwrap_or("story").to_owned();
    // a closed stderr has no reader
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {why}");
}

/// True if a program is on the `PATH` of the test.
pub fn has_program(name: &str) -> bool {
    program(name).is_some()
}

/// A program on the `PATH` of the test. A node has a `PATH` of its own.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(name))
        .find(|program| program.exists())
}

fn has_sys_admin() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    bits.is_some_and(|bits| bits & (1 << CAP_SYS_ADMIN) != 0)
}
