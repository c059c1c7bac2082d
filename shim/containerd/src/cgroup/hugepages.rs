//! The sizes of huge pages, as they are written in the names of a cgroup's files
//! (`hugetlb.2MB.current`).
//!
//! The kernel formats them as in mm/hugetlb_cgroup.c: whole gigabytes, else whole megabytes, else
//! kilobytes.

use std::fs;

/// The sizes of this kernel. They are read each time: usually two names, and a module can add a
/// third.
pub(super) fn sizes() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/kernel/mm/hugepages") else {
        return Vec::new();
    };
    let names =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let mut sizes: Vec<String> = names.filter_map(|name| size(&name)).collect();
    sizes.sort_unstable();
    sizes
}

/// `hugepages-2048kB` is `2MB`.
fn size(name: &str) -> Option<String> {
    let kilobytes: u64 = name
        .strip_prefix("hugepages-")?
        .strip_suffix("kB")?
        .parse()
        .ok()?;
    Some(match kilobytes {
        1_048_576.. => format!("{}GB", kilobytes >> 20),
        1024.. => format!("{}MB", kilobytes >> 10),
        _ => format!("{kilobytes}KB"),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(size("hugepages-1048576kB").as_deref(), Some("1GB"));
        assert_eq!(size("hugepages-2048kB").as_deref(), Some("2MB"));
        assert_eq!(size("hugepages-64kB").as_deref(), Some("64KB"));
        assert_eq!(
            (
                size("hugepages-kB"),
                size("hugepages-2048MB"),
                size("2048kB")
            ),
            (None, None, None)
        );
    }

    proptest! {
        #[test]
        fn any_name_is_read_without_panic(name: String) {
            let _ = size(&name);
        }
    }
}
