//! The access, read-write or read-only, that a bind of a spec gives the container.

/// The combined access that the options of a bind request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedAccess {
    /// The default.
    ReadWrite,
    /// `ro`: the bind's own mount is read-only. Mounts below it stay writable.
    ReadOnly,
    /// `rro`: every mount that is below the bind at its creation is also read-only.
    /// mount_setattr(2), Linux 5.12
    RecursivelyReadOnly,
}

impl RequestedAccess {
    /// Reads the access from mount options. runc and crun treat `ro` and `rro` separately. Of `ro`
    /// and `rw`, the last option applies. crun, and runc before 1.2, pass `rro` and `rrw` together
    /// to mount_setattr(2). The kernel clears flags before it sets flags: `rro` applies in any
    /// order.
    pub fn from_options<'a>(options: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut own, mut recursive) = (false, false);
        for option in options {
            match option {
                "ro" => own = true,
                "rw" => own = false,
                "rro" => recursive = true,
                _ => {}
            }
        }
        match (recursive, own) {
            (true, _) => Self::RecursivelyReadOnly,
            (false, true) => Self::ReadOnly,
            (false, false) => Self::ReadWrite,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_ro_and_rw_counts_and_rro_in_any_order() {
        assert_eq!(
            RequestedAccess::from_options(["rbind", "rw"]),
            RequestedAccess::ReadWrite
        );
        assert_eq!(
            RequestedAccess::from_options(["ro", "rw"]),
            RequestedAccess::ReadWrite
        );
        assert_eq!(
            RequestedAccess::from_options(["rw", "rbind", "ro"]),
            RequestedAccess::ReadOnly
        );
        assert_eq!(
            RequestedAccess::from_options(["rro", "ro", "rw"]),
            RequestedAccess::RecursivelyReadOnly
        );
        for options in [
            ["ro", "rro", "rrw"],
            ["rrw", "rro", "ro"],
            ["rro", "rw", "rrw"],
        ] {
            assert_eq!(
                RequestedAccess::from_options(options),
                RequestedAccess::RecursivelyReadOnly,
                "{options:?}"
            );
        }
        assert_eq!(
            RequestedAccess::from_options(["ro", "rrw"]),
            RequestedAccess::ReadOnly
        );
    }
}
