//! OCI runtimes that are known to mount something else than the spec says.
//!
//! bindguard compares the mounts of each new container, so a fault that is not in this list is
//! found, too.

use bindguard_sys::release_numbers;

/// The known fault of a runtime on this kernel. `version`: the first line of the runtime's
/// `--version`; `kernel`: the release, such as `6.12.9-amd64`.
pub(super) fn known_fault(version: &str, kernel: &str) -> Option<&'static str> {
    let (numbers, _) = release_numbers(version.strip_prefix("crun version ")?);
    match numbers[..] {
        // 1.27.1 repairs the fault: NEWS of crun.
        [1, 27] | [1, 27, 0, ..] => Some(
            "crun 1.27 takes mounts out of their peer groups, so that unmounts of the host do not reach containers \
             (containers/podman#28592); install 1.27.1 or newer",
        ),
        [1, 29, ..] if release_numbers(kernel).0 >= vec![7, 0] => Some(
            "crun 1.29 on Linux 7.0 or newer can bind its own root in place of the host's (containers/crun#2262); \
             install another version",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_known_by_version_and_kernel() {
        for (version, kernel, is_faulty) in [
            ("crun version 1.27", "6.1.0", true),
            ("crun version 1.27.0", "6.1.0", true),
            ("crun version 1.27.1", "6.1.0", false),
            ("crun version 1.28", "7.2.0", false),
            ("crun version 1.29", "7.0-rc3", true),
            ("crun version 1.29.1", "8.1.0", true),
            ("crun version 1.29", "6.18.5", false),
            ("runc version 1.29", "7.0.0", false),
            ("crun version UNKNOWN", "7.0.0", false),
            ("", "", false),
        ] {
            let found = known_fault(version, kernel);
            assert_eq!(found.is_some(), is_faulty, "{version:?} on {kernel:?}");
        }
    }
}
