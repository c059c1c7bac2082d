//! A mount table as the kernel would print it: for reports to people, and to prove that parsing
//! loses nothing.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::entry::{MountEntry, MountRoot, Propagation};
use super::escape::escape;
use super::table::MountTable;

impl MountEntry {
    /// This mount as a line of mountinfo, without the newline.
    pub fn to_line(&self) -> Vec<u8> {
        let mut line = format!("{} {} {} ", self.id.0, self.parent.0, self.device).into_bytes();
        line.extend(escape(&self.printed_root().to_kernel()));
        line.push(b' ');
        line.extend(escape(self.mount_point.as_os_str().as_bytes()));
        line.push(b' ');
        line.extend_from_slice(self.options.as_bytes());
        for field in optional_fields(&self.propagation) {
            line.push(b' ');
            line.extend_from_slice(field.as_bytes());
        }
        line.extend_from_slice(b" - ");
        line.extend(escape(self.fs_type.0.as_bytes()));
        line.push(b' ');
        line.extend(escape(self.source.as_bytes()));
        line.push(b' ');
        line.extend_from_slice(self.super_options.as_bytes());
        line
    }

    fn printed_root(&self) -> MountRoot {
        let is_in_source = self.root_in_source() == Some(&self.root.path);
        let path = if is_in_source {
            PathBuf::from("/")
        } else {
            self.root.path.clone()
        };
        MountRoot {
            path,
            deleted: self.root.deleted,
        }
    }
}

impl MountTable {
    /// The whole table as mountinfo.
    pub fn to_mountinfo(&self) -> Vec<u8> {
        self.entries()
            .iter()
            .flat_map(|entry| [entry.to_line(), b"\n".to_vec()].concat())
            .collect()
    }
}

fn optional_fields(propagation: &Propagation) -> Vec<String> {
    let numbered = [
        ("shared", propagation.peer_group),
        ("master", propagation.master),
        ("propagate_from", propagation.propagate_from),
    ];
    let mut fields: Vec<String> = numbered
        .iter()
        .filter_map(|(tag, n)| n.map(|n| format!("{tag}:{n}")))
        .collect();
    if propagation.unbindable {
        fields.push("unbindable".to_owned());
    }
    fields.extend(propagation.unknown.iter().cloned());
    fields
}
