//! Checks that the host's `/` is shared: rslave needs that to receive umounts, and older kernels
//! need it for a re-bind.

use std::path::Path;

use bindguard_core::mount_table::MountTable;

use super::Point;

const NAME: &str = "host-root";

/// The point for the host's `/`.
pub fn host_root(table: &MountTable) -> Point {
    match table.stack_at(Path::new("/")).last() {
        Some(root) if root.propagation.passes_umounts_on() => Point::ok(
            NAME,
            "/ is shared: umounts reach containers that follow them",
        ),
        Some(_) => Point::failed(
            NAME,
            "/ is private: no container can follow the host's umounts, whatever its mountPropagation",
            "mount --make-rshared /",
        ),
        None => Point::unknown(NAME, "the mount table has no /"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    #[test]
    fn private_is_bad() {
        let of = |tags: &str| {
            let line = format!("1 0 8:1 / / rw{tags} - ext4 /dev/sda1 rw\n");
            host_root(&MountTable::from_mountinfo(line.as_bytes()).unwrap()).status
        };
        assert_eq!(
            (of(" shared:1"), of(" master:1"), of("")),
            (PointStatus::Ok, PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(
            host_root(&MountTable::default()).status,
            PointStatus::Unknown
        );
    }
}
