//! `fs.may_detach_mounts`: on RHEL 7 a mount point that has a mount in another namespace can be
//! removed only if this is 1. Every kernel since 3.18 allows it by default and has no such key.

use bindguard_core::evidence::Observed;

use super::Point;

const NAME: &str = "detach-mounts";

/// The point for it; `setting` is the text of `/proc/sys/fs/may_detach_mounts`.
pub fn detach_mounts(setting: &Observed<String>) -> Point {
    match setting {
        Observed::Absent => Point::ok(
            NAME,
            "this kernel lets mount points be removed that are in use elsewhere",
        ),
        Observed::Seen(text) if text.trim() == "1" => Point::ok(NAME, "fs.may_detach_mounts is 1"),
        Observed::Seen(text) => Point::failed(
            NAME,
            format!(
                "fs.may_detach_mounts is {}: removing a pod's folders fails with \"device or resource busy\"",
                text.trim()
            ),
            "sysctl -w fs.may_detach_mounts=1",
        ),
        Observed::Unreadable(why) => Point::unknown(NAME, why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    #[test]
    fn only_a_zero_is_bad() {
        let of = |text: &str| detach_mounts(&Observed::Seen(text.to_owned())).status;
        assert_eq!(
            (of("1\n"), of("0\n")),
            (PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(detach_mounts(&Observed::Absent).status, PointStatus::Ok);
        assert_eq!(
            detach_mounts(&Observed::Unreadable("no".to_owned())).status,
            PointStatus::Unknown
        );
    }
}
