//! Kernel features that a re-bind uses, and the fallback for a missing feature.

use bindguard_sys::KernelFeatures;

use super::Point;
use super::kernel_fixes::mount_fixes;

/// The point for the kernel. `kubelet_is_shared`: the mount of the kubelet's folders is shared,
/// which re-binds on older kernels require, or why that is not known.
pub fn kernel(features: &KernelFeatures, kubelet_is_shared: Result<bool, String>) -> Point {
    const NAME: &str = "kernel";
    let release = &features.release;
    if let Err(old) = &features.required_calls {
        let message = format!("{old}; containers are created as they are");
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
    use std::thread;

    use bindguard_sys::kernel_features;
    use bindguard_testing::deny_call;
    use nix::errno::Errno;
    use nix::libc;

    use super::super::PointStatus;
    use super::*;

    fn features(beneath: bool) -> KernelFeatures {
        KernelFeatures {
            release: "6.1".to_owned(),
            required_calls: Ok(()),
            beneath,
            statmount: beneath,
        }
    }

    /// Older than all kernels on which the tests run: seccomp(2) answers in its stead.
    #[test]
    fn a_kernel_without_a_required_call_is_no_kernel_for_repairs() {
        let features = || {
            deny_call(libc::SYS_mount_setattr, Errno::ENOSYS);
            kernel_features()
        };
        let old = thread::spawn(features).join().unwrap();
        let point = kernel(&old, Ok(true));
        assert_eq!(point.status, PointStatus::Failed);
        assert!(point.message.contains("Linux 5.14"), "{}", point.message);
    }

    #[test]
    fn an_older_kernel_needs_a_shared_mount() {
        assert_eq!(kernel(&features(true), Ok(false)).status, PointStatus::Ok);
        assert_eq!(kernel(&features(false), Ok(true)).status, PointStatus::Ok);
        assert_eq!(
            kernel(&features(false), Err("why".to_owned())).status,
            PointStatus::Unknown
        );
        assert_eq!(
            kernel(&features(false), Ok(false)).command.as_deref(),
            Some("mount --make-rshared /")
        );
    }
}
