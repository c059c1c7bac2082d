//! Reads the kubelet's record of a CSI volume.

use std::path::Path;

use bindguard_core::kubelet::{CSI_RECORD, CsiRecord};
use bindguard_sys::read_file;

/// Size limit of a record.
const MAX_RECORD: u64 = 64 << 10;

/// The record in the folder of a volume or of a staging mount; `None` if the folder has no record.
pub(crate) fn csi_record_in(folder: &Path) -> Option<CsiRecord> {
    CsiRecord::from_json(&read_file(&folder.join(CSI_RECORD), MAX_RECORD).ok()?)
}
