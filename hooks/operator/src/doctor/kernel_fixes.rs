//! Faults of Linux in the calls that re-binds and refreshes make, and the versions with their fixes.
//!
//! The versions are those of Debian's kernel changelogs (6.12.117-1 and 7.2.13-1, November 2026).

use bindguard_sys::release_numbers;

/// A fault, and the first version of each series that has the fix.
struct Fault {
    what: &'static str,
    /// The first version with the fault; `(0, 0)`: all that the table knows.
    since: (u32, u32),
    fixed: &'static [(u32, u32, u32)],
}

const FAULTS: [Fault; 5] = [
    Fault {
        what: "a mount that propagates beneath a locked mount takes its lock (CVE-2026-98976)",
        since: (7, 1),
        fixed: &[(7, 2, 11)],
    },
    Fault {
        what: "a busy mount is unmounted silently (CVE-2026-98996)",
        since: (0, 0),
        fixed: &[(6, 12, 117), (7, 2, 11)],
    },
    Fault {
        what: "mount_setattr walks a mount that was unmounted",
        since: (0, 0),
        fixed: &[(6, 12, 115), (7, 2, 11)],
    },
    Fault {
        what: "an unmounted tree of mounts can be copied",
        since: (0, 0),
        fixed: &[(6, 12, 113), (7, 2, 11)],
    },
    Fault {
        what: "a mount that a copy leaves out takes over a lock",
        since: (0, 0),
        fixed: &[(7, 2, 13)],
    },
];

/// Which fixes the kernel has. `release`: as `uname -r` prints it. A vendor's kernel may have a fix
/// under an older number, so nothing is called missing there.
pub(super) fn mount_fixes(release: &str) -> String {
    let (mut missing, mut unknown) = (Vec::new(), 0);
    let (numbers, suffix) = release_numbers(release);
    // A patch level of 0 is a release of upstream, or a vendor's kernel with fixes of its own.
    let (major, minor, patch) = match numbers.as_slice() {
        &[major, minor, patch] if patch > 0 => (major, minor, patch),
        _ => return "which fixes of 2026 for mounts it has is unknown".to_owned(),
    };
    let is_upstreams = suffix.is_empty() || suffix.starts_with("+deb");
    for fault in &FAULTS {
        let fix = fault
            .fixed
            .iter()
            .find(|fix| (fix.0, fix.1) == (major, minor));
        match fix {
            _ if (major, minor) < fault.since => {}
            Some(fix) if patch >= fix.2 => {}
            Some(_) if is_upstreams => missing.push(fault.what),
            _ => unknown += 1,
        }
    }
    let mut text = format!(
        "fixes of 2026 for mounts (docs/security.md): {} of {}",
        FAULTS.len() - missing.len() - unknown,
        FAULTS.len()
    );
    if unknown > 0 {
        text += &format!(", {unknown} unknown");
    }
    if !missing.is_empty() {
        text += &format!("; not fixed: {}", missing.join("; "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_upstreams_numbers_tell_that_a_fix_is_missing() {
        for (release, has) in [
            ("7.2.13", ": 5 of 5"),
            ("7.2.13-talos", ": 5 of 5"),
            ("7.2.11", ": 4 of 5; not fixed: a mount that a copy"),
            (
                "7.2.10+deb14-amd64",
                ": 0 of 5; not fixed: a mount that propagates",
            ),
            ("7.2.10-talos", ": 0 of 5, 5 unknown"),
            (
                "6.12.114+deb13-cloud-amd64",
                ": 2 of 5, 1 unknown; not fixed: a busy mount",
            ),
            ("6.12.117+deb13-amd64", ": 4 of 5, 1 unknown"),
            ("6.12.0-55.el10_0.x86_64", "is unknown"),
            ("6.8.0-31-generic", "is unknown"),
            ("6.1.176", ": 1 of 5, 4 unknown"),
            ("7.3.0-rc7", "is unknown"),
            ("", "is unknown"),
        ] {
            let said = mount_fixes(release);
            assert!(said.contains(has), "{release}: {said}");
        }
    }
}
