//! SELinux's decision if a process may read a file, by the files of selinuxfs. The kernel's
//! security/selinux/selinuxfs.c has their formats.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxFlags, getxattr, statx};

use crate::Handle;
use crate::enter::HeldProcess;

const SELINUXFS: &str = "/sys/fs/selinux";

/// Limit of a label: a page, the kernel's limit for a request.
const MAX_LABEL: usize = 4096;

/// The flag of an answer about a process whose type is permissive: nothing is denied to the process.
const IS_PERMISSIVE: u32 = 1;

/// True if SELinux enforces a policy that denies this process to read the file. False if no policy
/// is enforced, or if the kernel does not answer.
pub fn selinux_denies_read(process: &HeldProcess, file: &Handle) -> bool {
    is_enforcing() && denies_read(process, file).unwrap_or(false)
}

fn is_enforcing() -> bool {
    fs::read(Path::new(SELINUXFS).join("enforce")).is_ok_and(|text| text.first() == Some(&b'1'))
}

fn denies_read(process: &HeldProcess, file: &Handle) -> io::Result<bool> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let mode = statx(file, c"", flags, StatxFlags::TYPE)?.stx_mode;
    let (class, permissions) = match FileType::from_raw_mode(mode.into()) {
        FileType::Directory => ("dir", &["search", "read"][..]),
        FileType::RegularFile => ("file", &["read"][..]),
        FileType::Socket => ("sock_file", &["write"][..]),
        _ => return Ok(false),
    };
    let process = process.read("attr/current").map_err(io::Error::other)?;
    let class = Path::new(SELINUXFS).join("class").join(class);
    let request = [
        text_of(&process)?,
        text_of(&label_of(file)?)?,
        number_in(class.join("index"))?.to_string(),
    ];
    let (allowed, flags) = answer(&request.join(" "))?;
    if flags & IS_PERMISSIVE != 0 {
        return Ok(false);
    }
    for permission in permissions {
        let number = number_in(class.join("perms").join(permission))?;
        let bit = number.checked_sub(1).and_then(|bit| 1_u32.checked_shl(bit));
        if bit.is_some_and(|bit| allowed & bit == 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The label of a file. The kernel knows the label of an open file: no request goes to a server.
fn label_of(file: &Handle) -> io::Result<Vec<u8>> {
    let mut label = vec![0; MAX_LABEL];
    let length = getxattr(file.magic_path(), c"security.selinux", &mut label)?;
    label.truncate(length);
    Ok(label)
}

/// The allowed permissions and the flags.
fn answer(request: &str) -> io::Result<(u32, u32)> {
    let mut access = OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new(SELINUXFS).join("access"))?;
    access.write_all(request.as_bytes())?;
    let mut answer = String::new();
    access.read_to_string(&mut answer)?;
    let mut fields = answer
        .split_whitespace()
        .map(|it| u32::from_str_radix(it, 16));
    match (fields.next(), fields.nth(4)) {
        (Some(Ok(allowed)), Some(Ok(flags))) => Ok((allowed, flags)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn number_in(file: PathBuf) -> io::Result<u32> {
    let text = fs::read_to_string(file)?;
    text.trim().parse().map_err(io::Error::other)
}

/// A label without the NUL byte or the newline at its end.
fn text_of(label: &[u8]) -> io::Result<String> {
    let text = String::from_utf8(label.to_vec()).map_err(io::Error::other)?;
    Ok(text.trim_end_matches(['\0', '\n']).to_owned())
}
