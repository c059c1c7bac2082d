//! OCI runtimes that are known to mount something else than the spec says.
//!
//! bindguard compares the mounts of each new container, so a fault that is not in this list is
//! found, too.

/// The known fault of a runtime on this kernel. `version`: the first line of the runtime's
/// `--version`; `kernel`: the release, such as `6.12.9-amd64`.
pub(super) fn known_fault(version: &str, kernel: &str) -> Option<&'static str> {
    let number = version.strip_prefix("crun version ")?;
    match leading_numbers(number)? {
        // 1.27.1 repairs the fault: NEWS of crun.
        (1, 27) if !number.starts_with("1.27.") || number.starts_with("1.27.0") => Some(
            "crun 1.27 takes mounts out of their peer groups, so that unmounts of the host do not reach containers \
             (containers/podman#28592); install 1.27.1 or newer",
        ),
        (1, 29) if leading_numbers(kernel)? >= (7, 0) => Some(
            "crun 1.29 on Linux 7.0 or newer can bind its own root in place of the host's (containers/crun#2262); \
             install another version",
        ),
        _ => None,
    }
}

/// The first two numbers of a version.
fn leading_numbers(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next().and_then(|minor| minor.parse().ok());
    Some((major, minor.unwrap_or(0)))
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
