//! Remembers probes that hang: no filesystem is probed again while its last probe hangs.
//!
//! A process whose request a FUSE daemon took ends only with the answer. Each further probe of the
//! filesystem would add such a process, for as long as the daemon is silent: the kubelet tries the
//! create of a container again and again, and each guard is a process of its own. So the
//! [register](crate::hanging_processes) lists the process of a silent probe until its end, and until
//! then the filesystem counts as silent for all programs.
//!
//! The device names the filesystem. A volume that is mounted anew has a new device and is probed at
//! once, and a hanging process keeps the number of the old device in use. Local filesystems do not
//! count.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bindguard_core::mount_table::Device;
use bindguard_core::paths::{below, lies_in};

use crate::handle::Handle;
use crate::hanging_processes;
use crate::mounts::Mounts;
use crate::poll::is_readable;
use crate::separate_process::{Patience, SeparateProcess, answers, read_until, write_answer};

/// The limit of filesystems on the way to a path.
const MAX_FILESYSTEMS: usize = 16;

/// The silent filesystems and the pidfds of their probes, where the register cannot be written.
static NOT_LISTED: Mutex<Vec<(SilentFilesystem, OwnedFd)>> = Mutex::new(Vec::new());

/// The filesystem on a server or a daemon for which a walk to a path may wait. Where the kernel has
/// only a part of the path in its cache, a mount in the rest of the path may be the silent mount as
/// well: then the value has all these devices, and is equal only to a value with the same devices.
///
/// A pod cannot make the volume of another pod count as silent: the guard's own probe hung on this
/// very filesystem, and so would the runtime of each pod that binds the filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SilentFilesystem(String);

impl SilentFilesystem {
    /// `None` for a local filesystem.
    pub(crate) fn of(path: &Path, mounts: &Mounts) -> Option<Self> {
        let cached = |known| Some((known, Handle::cached(known)?));
        // The root of a mount is always in the cache.
        let (known, handle) = path.ancestors().find_map(cached)?;
        let handle = handle.unqueried();
        let mount = mounts.mount_of(&handle).ok()?.entry;
        let mut devices = BTreeSet::new();
        if !mount.fs_type.is_local() {
            devices.insert(mount.device);
        }
        if path != known {
            let from = handle.resolved_path().ok()?;
            let end = from.join(below(path, known)?);
            for mount in mounts.complete_table().ok()?.entries() {
                let place = &mount.mount_point;
                let is_on_the_way = *place != from && lies_in(place, &from) && lies_in(&end, place);
                if is_on_the_way && !mount.fs_type.is_local() {
                    devices.insert(mount.device);
                }
            }
        }
        if devices.is_empty() || devices.len() > MAX_FILESYSTEMS {
            return None;
        }
        Some(Self::of_devices(&devices))
    }

    fn of_devices(devices: &BTreeSet<Device>) -> Self {
        let mut subject = "filesystem".to_owned();
        for device in devices {
            subject.push_str(&format!(" {device}"));
        }
        Self(subject)
    }

    /// Ends the process of a silent probe, and remembers that process until its end.
    pub(crate) fn add(self, process: SeparateProcess) {
        if let Some(not_listed) = process.kill_and_list(&self.0) {
            not_listed_here().push((self, not_listed));
        }
    }
}

/// The filesystems with a probe that hangs.
pub(crate) fn silent_filesystems() -> Vec<SilentFilesystem> {
    let mut silent: Vec<SilentFilesystem> = Vec::new();
    for subject in hanging_processes::hanging() {
        silent.push(SilentFilesystem(subject));
    }
    for (filesystem, _) in not_listed_here().iter() {
        silent.push(filesystem.clone());
    }
    silent
}

fn not_listed_here() -> MutexGuard<'static, Vec<(SilentFilesystem, OwnedFd)>> {
    let mut hanging = NOT_LISTED.lock().unwrap_or_else(PoisonError::into_inner);
    hanging.retain(|(_, process)| !is_readable(process.as_fd(), Duration::ZERO));
    hanging
}

/// Does work with this path in a separate process, which may hang in this one's place.
///
/// # Errors
/// Those of the work. `TimedOut` without a number of the kernel if there is no answer in time, or
/// if an earlier process hangs on the filesystem.
pub(crate) fn answer_within(
    time: Duration,
    path: &Path,
    work: impl FnOnce() -> io::Result<Vec<u8>>,
) -> io::Result<Vec<u8>> {
    let silent = silent_filesystems();
    if !silent.is_empty()
        && let Some(filesystem) = SilentFilesystem::of(path, &Mounts::default())
        && silent.contains(&filesystem)
    {
        let why = "an earlier request to its server or daemon still has no answer";
        return Err(io::Error::new(io::ErrorKind::TimedOut, why));
    }
    let mut process = SeparateProcess::start_listable(|pipe| write_answer(pipe, work()))?;
    let patience = Patience {
        each: time,
        all: time,
    };
    let (received, _) = read_until(process.output(), patience)?;
    if let Some(answer) = answers(&received).pop() {
        return answer;
    }
    if let Some(filesystem) = SilentFilesystem::of(path, &Mounts::default()) {
        filesystem.add(process);
    }
    let why = format!("it did not answer within {} ms", time.as_millis());
    Err(io::Error::new(io::ErrorKind::TimedOut, why))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::thread::sleep;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn an_error_without_a_number_is_no_success() {
        let answer = |kind: io::ErrorKind| {
            let work = || Err(io::Error::new(kind, "no number"));
            answer_within(Duration::from_secs(10), Path::new("/"), work)
                .unwrap_err()
                .kind()
        };
        let invalid = io::ErrorKind::InvalidInput;
        assert_eq!(answer(invalid), invalid);
        let other = answer(io::ErrorKind::Other);
        assert_eq!(other, io::Error::from(Errno::IO).kind());
        let late = answer_within(Duration::from_millis(10), Path::new("/"), || {
            sleep(Duration::from_secs(1000));
            Ok(Vec::new())
        });
        let late = late.unwrap_err();
        assert_eq!(
            (late.kind(), late.raw_os_error()),
            (io::ErrorKind::TimedOut, None)
        );
    }
}
