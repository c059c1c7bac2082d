//! The paths, keys and texts that kubediag v0.3.1 defines: `pkg/processors` and `pkg/executor` of
//! kubediag/kubediag.

/// The folder of all processors.
pub const FOLDER: &str = "/processor/";

/// The parameters that name a pod.
pub const POD_NAMESPACE: &str = "pod.namespace";
pub const POD_NAME: &str = "pod.name";

/// The result of podDetailCollector: the Pod as JSON.
pub const POD_DETAIL: &str = "collector.kubernetes.pod.detail";
/// The result of mountInfoCollector: the text of a mount table.
pub const MOUNT_INFO: &str = "collector.system.mountinfo";
/// The results of subpathRemountDiagnoser.
pub const DIAGNOSIS: &str = "diagnoser.kubernetes.subpath_remount.result";
pub const BUG_LINK: &str = "diagnoser.kubernetes.subpath_remount.bug_link";
pub const SOURCE: &str = "diagnoser.kubernetes.subpath_remount.original_source_path";
pub const TARGET: &str = "diagnoser.kubernetes.subpath_remount.original_destination_path";
/// The result of subpathRemountRecover.
pub const RECOVERY: &str = "recover.kubernetes.subpath_remount.result";

/// The text of a diagnosis.
pub const ENCOUNTERED: &str =
    "A kubernetes bug #68211 has been encountered on pod subpath remounting.";

/// Limit of an answer in bytes.
pub const MAX_BYTES: usize = 2 << 20;

/// A processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    PodDetailCollector,
    MountInfoCollector,
    SubpathRemountDiagnoser,
    SubpathRemountRecover,
}

impl Processor {
    const ALL: [Self; 4] = [
        Self::PodDetailCollector,
        Self::MountInfoCollector,
        Self::SubpathRemountDiagnoser,
        Self::SubpathRemountRecover,
    ];

    /// The processor at a path.
    pub fn of_path(path: &str) -> Option<Self> {
        let name = path.strip_prefix(FOLDER)?;
        Self::ALL
            .into_iter()
            .find(|processor| processor.name() == name)
    }

    /// The processor's name, which is the last part of the path.
    pub fn name(self) -> &'static str {
        match self {
            Self::PodDetailCollector => "podDetailCollector",
            Self::MountInfoCollector => "mountInfoCollector",
            Self::SubpathRemountDiagnoser => "subpathRemountDiagnoser",
            Self::SubpathRemountRecover => "subpathRemountRecover",
        }
    }
}

/// The text of a recovery, spelled as kubediag spells it: its users may compare it.
pub fn recovered(target: &str) -> String {
    format!("Succeesfully umount {target} on host")
}

/// The whole table if it fits into an answer, else its lines about subpaths: the diagnoser reads
/// only these lines.
pub fn short_mount_info(text: String) -> String {
    // Each quote and backslash becomes two bytes.
    if text.len() <= MAX_BYTES / 2 {
        return text;
    }
    let subpaths = text
        .split_inclusive('\n')
        .filter(|line| line.contains("/volume-subpaths/"));
    subpaths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_processor_exactly() {
        assert_eq!(
            Processor::of_path("/processor/podDetailCollector"),
            Some(Processor::PodDetailCollector)
        );
        for path in [
            "/processor/",
            "/processor/poddetailcollector",
            "/podDetailCollector",
            "/processor/nodeCordon",
        ] {
            assert_eq!(Processor::of_path(path), None, "{path}");
        }
    }

    #[test]
    fn a_table_that_is_too_long_keeps_its_subpaths() {
        let other = "1 0 8:1 / /var/lib/containers/storage rw - ext4 /dev/sda1 rw\n".repeat(40_000);
        let subpath =
            "2 1 8:1 /x//deleted /k/pods/u/volume-subpaths/v/c/0 rw - ext4 /dev/sda1 rw\n";
        assert_eq!(short_mount_info(format!("{other}{subpath}")), subpath);
        assert_eq!(short_mount_info(subpath.repeat(2)), subpath.repeat(2));
    }
}
