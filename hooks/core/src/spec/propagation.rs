//! The mount propagation that a spec requests, in the terms of mount(8) and of the runtime spec.

/// The combined propagation that the options of a bind request.
///
/// See mount_namespaces(7). The `r` of rprivate, rslave and rshared is distinguished only where it
/// changes which mounts a host umount reaches. With plain `slave` the submounts stay as they were
/// cloned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RequestedPropagation {
    /// No propagation option at all: runc and crun make the bind rprivate.
    #[default]
    Nothing,
    /// `private` or `rprivate`.
    Private,
    /// `slave` without `rslave`.
    Slave,
    /// `rslave`.
    RecursiveSlave,
    /// `shared` or `rshared`, alone or among other options: the container's mounts should reach the
    /// host.
    Shared,
    /// `unbindable` or `runbindable`.
    Unbindable,
}

impl RequestedPropagation {
    /// Combines the propagation of all mount options. If an option is shared, the bind is treated
    /// as shared. Otherwise the option that lowers propagation most applies, as in runc: a private
    /// mount made slave stays private.
    pub fn from_options<'a>(options: impl IntoIterator<Item = &'a str>) -> Self {
        options
            .into_iter()
            .filter_map(Self::from_option)
            .fold(
                Self::Nothing,
                |a, b| if b.rank() > a.rank() { b } else { a },
            )
    }

    /// The propagation that a mount option requests; `None` for options that do not set
    /// propagation.
    pub fn from_option(option: &str) -> Option<Self> {
        match option {
            "private" | "rprivate" => Some(Self::Private),
            "slave" => Some(Self::Slave),
            "rslave" => Some(Self::RecursiveSlave),
            "shared" | "rshared" => Some(Self::Shared),
            "unbindable" | "runbindable" => Some(Self::Unbindable),
            _ => None,
        }
    }

    /// True if host umounts would stop at this bind, or at its submounts.
    pub fn keeps_host_mounts_alive(self) -> bool {
        match self {
            // mount_namespaces(7): unbindable mounts are private mounts.
            Self::Nothing | Self::Private | Self::Slave | Self::Unbindable => true,
            Self::RecursiveSlave | Self::Shared => false,
        }
    }

    fn rank(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::RecursiveSlave => 1,
            Self::Slave => 2,
            Self::Private => 3,
            Self::Unbindable => 4,
            Self::Shared => 5,
        }
    }
}

/// `linux.rootfsPropagation` of a spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootfsPropagation {
    /// Not set: an rslave bind receives umounts under runc's default, but not under crun's.
    Unset,
    /// Set to this word.
    Set(String),
}

impl RootfsPropagation {
    /// True if an rslave bind receives the host's umounts under both runc and crun.
    pub fn lets_umounts_in(&self) -> bool {
        matches!(self, Self::Set(word) if word == "rslave" || word == "rshared")
    }

    /// True if the container's own mounts are meant to propagate out of it.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Set(word) if word == "shared" || word == "rshared")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_is_never_taken_for_less() {
        assert_eq!(
            RequestedPropagation::from_options(["rprivate", "rshared", "rslave"]),
            RequestedPropagation::Shared
        );
        assert_eq!(
            RequestedPropagation::from_options(["rbind", "ro"]),
            RequestedPropagation::Nothing
        );
        assert_eq!(
            RequestedPropagation::from_options(["slave", "rbind"]),
            RequestedPropagation::Slave
        );
        assert_eq!(
            RequestedPropagation::from_options(["rprivate", "rslave"]),
            RequestedPropagation::Private
        );
        for option in ["unbindable", "runbindable"] {
            assert_eq!(
                RequestedPropagation::from_options(["rprivate", option]),
                RequestedPropagation::Unbindable
            );
        }
    }
}
