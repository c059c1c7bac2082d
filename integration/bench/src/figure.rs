//! The measured quantities and their units.

use serde::{Deserialize, Serialize};

/// A figure that candidates are compared by, in the order of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Figure {
    /// Memory that goes away with an idle shim.
    PrivateDirty,
    /// A shim's proportional share of memory, many shims being there.
    Pss,
    /// The private memory of all shims of a full node.
    PrivateOfAll,
    /// The proportional shares of all these shims.
    PssOfAll,
    /// The resident pages of all these shims; a shared page counts once for each shim.
    RssOfAll,
    /// Threads of an idle shim.
    Threads,
    /// Runs of an idle shim's threads per minute.
    WakeUps,
    /// From the exec of `start` until the shim answered its first call.
    StartWall,
    /// CPU time of the command `start` and of the shim until then.
    StartCpu,
    /// CPU time of the command `start` alone.
    StartCommandCpu,
    /// `ctr run --rm` of a program that ends at once.
    LifeCpu,
    /// The same, by the clock on the wall.
    LifeWall,
    /// The same, with so many more mounts on the host.
    LifeAmongMounts,
    /// The part of a shim's own process, for a further container of a pod.
    ShimAmongMounts,
    /// The shim and its `runc exec`, above a bare `runc exec`.
    ExecAboveBare,
    /// Fifty pods at once by eight clients.
    BurstWall,
    BurstCpu,
    /// The guard with its exec, above the runtime alone.
    GuardCpu,
    /// The same, by the clock on the wall.
    GuardWall,
    /// A create that repairs stale subpaths, minus a create without findings.
    RepairCpu,
    /// The same, by the clock on the wall.
    RepairWall,
    /// The guard's work on a spec with 30 binds and nothing stale.
    WorkClean,
    /// The same with five stale subpaths.
    WorkRepaired,
    /// Reading and parsing mountinfo, which the guard does not do.
    MountinfoRead,
    /// A shim's program as it comes.
    ShippedSize,
    /// The same after strip(1).
    StrippedSize,
}

struct Words(&'static str, &'static str, Option<&'static str>);

impl Figure {
    /// Title, unit, and the variable for figures that grow with a number of things.
    fn words(self) -> Words {
        let mounts = Some("more mounts");
        match self {
            Self::PrivateDirty => Words(
                "private dirty memory of an idle shim",
                "KiB",
                Some("containers"),
            ),
            Self::Pss => Words("PSS of an idle shim", "KiB", Some("pods")),
            Self::PrivateOfAll => Words("private memory of all shims", "MiB", Some("pods")),
            Self::PssOfAll => Words("PSS of all shims", "MiB", Some("pods")),
            Self::RssOfAll => Words("RSS of all shims", "MiB", Some("pods")),
            Self::Threads => Words("threads of an idle shim", "", None),
            Self::WakeUps => Words("wake-ups of an idle shim in 60 s", "", None),
            Self::StartWall => Words("`start` until the first answer, wall", "ms", None),
            Self::StartCpu => Words(
                "`start` and the shim until the first answer, CPU",
                "ms",
                None,
            ),
            Self::StartCommandCpu => Words("the command `start` alone, CPU", "ms", None),
            Self::LifeCpu => Words("`ctr run --rm`, CPU", "ms", None),
            Self::LifeWall => Words("`ctr run --rm`, wall", "ms", None),
            Self::LifeAmongMounts => Words("`ctr run --rm`, CPU", "ms", mounts),
            Self::ShimAmongMounts => Words("of it the shim's own process, CPU", "ms", mounts),
            Self::ExecAboveBare => Words("exec, CPU above a bare `runc exec`", "ms", None),
            Self::BurstWall => Words("50 pods at once by 8 clients, wall", "s", None),
            Self::BurstCpu => Words("50 pods at once by 8 clients, CPU", "s", None),
            Self::GuardCpu => Words("the guard with its exec, CPU", "ms", mounts),
            Self::GuardWall => Words("the guard with its exec, wall", "ms", mounts),
            Self::RepairCpu => Words(
                "a repaired create over a clean one, CPU",
                "ms",
                Some("stale"),
            ),
            Self::RepairWall => Words(
                "a repaired create over a clean one, wall",
                "ms",
                Some("stale"),
            ),
            Self::WorkClean => Words("the guard's work, nothing stale, CPU", "µs", mounts),
            Self::WorkRepaired => Words("the guard's work, 5 stale repaired, CPU", "µs", mounts),
            Self::MountinfoRead => Words(
                "for comparison: reading and parsing mountinfo, CPU",
                "µs",
                mounts,
            ),
            Self::ShippedSize => Words("the shim's program as it comes", "MB", None),
            Self::StrippedSize => Words("the shim's program, stripped", "MB", None),
        }
    }

    /// As tables call it.
    pub fn title(self) -> &'static str {
        self.words().0
    }

    /// Of its values.
    pub fn unit(self) -> &'static str {
        self.words().1
    }

    /// The variable, if the figure has a variable: the number of containers in the shim, of pods,
    /// of mounts.
    pub fn over(self) -> Option<&'static str> {
        self.words().2
    }

    /// A value as tables show it.
    pub fn show(self, value: f64) -> String {
        match self.unit() {
            "KiB" | "µs" | "" => format!("{value:.0}"),
            "s" => format!("{value:.2}"),
            _ => format!("{value:.1}"),
        }
    }
}
