//! Kernel features that a re-bind uses, and the fallback for a missing feature.

use bindguard_sys::KernelFeatures;

use super::Point;
use super::kernel_fixes::mount_fixes;

/// The point for the kernel. `kubelet_is_shared`: the mount of the kubelet's folders is shared,
/// which re-binds on older kernels require, or why that is not known.
pub fn kernel(features: &KernelFeatures, kubelet_is_shared: Result<bool, String>) -> Point {
    const NAME: &str = "kernel";
    let release = &features.release;
    if !features.openat2 || !features.mount_ids {
        let message = format!(
            "Linux {release} cannot report the mount of a path: nothing is judged; 5.8 is the oldest that can"
        );
        return Point::failed(NAME, message, "uname -r");
    }
    let swap = match (features.beneath, kubelet_is_shared) {
        (true, _) => "mounts are swapped beneath",
        (false, Err(why)) => return Point::unknown(NAME, why),
        (false, Ok(true)) => "mounts are swapped by propagation (before 6.5)",
        (false, Ok(false)) => {
            let message = format!(
                "Linux {release} cannot mount beneath, and the mount of the kubelet's folders is private: no re-bind; specs are \
                 pointed at volumes instead"
            );
            return Point::failed(NAME, message, "mount --make-rshared /");
        }
    };
    let look = if features.statmount {
        "statmount"
    } else {
        "the mount table (before 6.8)"
    };
    let fixes = mount_fixes(release);
    Point::ok(
        NAME,
        format!("Linux {release}: {swap}, read by {look}; {fixes}"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    fn features(beneath: bool, mount_ids: bool) -> KernelFeatures {
        KernelFeatures {
            release: "6.1".to_owned(),
            openat2: true,
            mount_ids,
            beneath,
            statmount: beneath,
        }
    }

    #[test]
    fn an_older_kernel_needs_a_shared_mount() {
        assert_eq!(
            kernel(&features(true, true), Ok(false)).status,
            PointStatus::Ok
        );
        assert_eq!(
            kernel(&features(false, true), Ok(true)).status,
            PointStatus::Ok
        );
        assert_eq!(
            kernel(&features(false, true), Err("why".to_owned())).status,
            PointStatus::Unknown
        );
        assert_eq!(
            kernel(&features(false, true), Ok(false)).command.as_deref(),
            Some("mount --make-rshared /")
        );
        assert_eq!(
            kernel(&features(true, false), Ok(true)).status,
            PointStatus::Failed
        );
    }
}
