//! The kubelet's update of a volume: readers see all of it or nothing.
//!
//! Mirrors `pkg/volume/util/atomic_writer.go`, `AtomicWriter.Write`, in its order since 1.23:
//!
//! ```text
//!   VOLUME/..2026_11_21_05_10_00.123456789/app.conf     the payload, in a new timestamp directory
//!   VOLUME/..data_tmp -> ..2026_…                        then renamed over ..data
//!   VOLUME/app.conf -> ..data/app.conf                   the user-visible link
//! ```
//!
//! Last, the old timestamp directory is removed: that is the moment at which a subpath's bind mount
//! becomes stale, and where a mount on the file makes the removal fail with EBUSY, which the real
//! kubelet reports and forgets.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use time::OffsetDateTime;
use time::macros::format_description;

/// The wanted files of a volume: relative path and content.
pub(super) type Payload<'a> = [(&'a str, &'a str)];

/// Writes `payload` to `volume`, unless the volume already has this payload.
pub(super) fn write(volume: &Path, payload: &Payload<'_>) -> Result<()> {
    let data = volume.join("..data");
    let old = match fs::read_link(&data) {
        Ok(name) => Some(volume.join(name)),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            return Err(error).with_context(|| format!("read the link {}", data.display()));
        }
    };
    let stale = old
        .as_deref()
        .map(|old| names_to_remove(old, payload))
        .transpose()?
        .unwrap_or_default();
    if let Some(old) = &old
        && stale.is_empty()
        && is_current(old, payload)
    {
        return Ok(());
    }
    let new = new_timestamp_directory(volume)?;
    write_payload(&new, payload)?;
    switch(volume, &new)?;
    create_links(volume, payload)?;
    for name in stale {
        remove_link(&volume.join(name))?;
    }
    match old {
        Some(old) => remove_all(&old)
            .with_context(|| format!("remove the old timestamp directory {}", old.display())),
        None => Ok(()),
    }
}

/// Go's `os.RemoveAll`: an already removed file is no error.
fn remove_all(directory: &Path) -> io::Result<()> {
    loop {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) if fs::exists(directory)? => {}
            _ => return Ok(()),
        }
    }
}

/// Top-level names of the old payload that are missing in the new payload.
fn names_to_remove(old: &Path, payload: &Payload<'_>) -> Result<Vec<PathBuf>> {
    let wanted: BTreeSet<&OsStr> = payload.iter().filter_map(|(path, _)| top(path)).collect();
    let entries = fs::read_dir(old).with_context(|| format!("list {}", old.display()))?;
    let names = entries
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<Vec<_>>>()?;
    Ok(names
        .into_iter()
        .filter(|name| !wanted.contains(name.as_os_str()))
        .map(PathBuf::from)
        .collect())
}

fn is_current(old: &Path, payload: &Payload<'_>) -> bool {
    payload
        .iter()
        .all(|(path, content)| fs::read_to_string(old.join(path)).is_ok_and(|now| now == *content))
}

/// `os.MkdirTemp(dir, "..2006_01_02_15_04_05.")`: the random part is a number, not a fraction of
/// the second.
fn new_timestamp_directory(volume: &Path) -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = OffsetDateTime::now_utc();
    let second = now
        .format(format_description!(
            "[year]_[month]_[day]_[hour]_[minute]_[second]"
        ))
        .context("format the time")?;
    for _ in 0..100 {
        let number = now
            .nanosecond()
            .wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = volume.join(format!("..{second}.{number:09}"));
        match fs::create_dir(&folder) {
            Ok(()) => {
                let open = fs::Permissions::from_mode(0o755);
                fs::set_permissions(&folder, open)
                    .with_context(|| format!("open {} to readers", folder.display()))?;
                return Ok(folder);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).with_context(|| format!("create {}", folder.display()));
            }
        }
    }
    bail!(
        "no free name for a timestamp directory in {}",
        volume.display()
    )
}

fn write_payload(folder: &Path, payload: &Payload<'_>) -> Result<()> {
    for (path, content) in payload {
        let file = folder.join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        }
        fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// The only atomic step: readers follow `..data`.
fn switch(volume: &Path, new: &Path) -> Result<()> {
    let (temporary, data) = (volume.join("..data_tmp"), volume.join("..data"));
    let name = new
        .file_name()
        .context("a timestamp directory has a name")?;
    symlink(name, &temporary).with_context(|| format!("link {}", temporary.display()))?;
    fs::rename(&temporary, &data)
        .with_context(|| format!("rename {} to {}", temporary.display(), data.display()))
}

fn create_links(volume: &Path, payload: &Payload<'_>) -> Result<()> {
    for name in payload.iter().filter_map(|(path, _)| top(path)) {
        let link = volume.join(name);
        match symlink(Path::new("..data").join(name), &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("link {}", link.display()));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

fn remove_link(link: &Path) -> Result<()> {
    fs::remove_file(link).with_context(|| format!("remove the link {}", link.display()))
}

fn top(path: &str) -> Option<&OsStr> {
    Path::new(path)
        .components()
        .next()
        .map(Component::as_os_str)
}
