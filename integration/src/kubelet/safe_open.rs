//! Opening a sub path so that no container can lead the kubelet out of the volume
//! (CVE-2017-1002101).
//!
//! Mirrors `doSafeOpen` of `pkg/volume/util/subpath/subpath_linux.go`: symlinks are resolved once,
//! then the result is walked again component by component with O_NOFOLLOW. A symlink met on the
//! second walk was planted in between.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, fstat};

/// Opens `volume/sub_path` with O_PATH. Fails when it leads out of `volume`.
pub(super) fn safe_open(volume: &Path, sub_path: &str) -> Result<OwnedFd> {
    let base = resolve(volume)?;
    let path = resolve(&volume.join(sub_path))?;
    let Ok(segments) = path.strip_prefix(&base) else {
        bail!(
            "{} is outside of the volume {}",
            path.display(),
            base.display()
        );
    };
    let flags = OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut place =
        open(&base, flags, Mode::empty()).with_context(|| format!("open {}", base.display()))?;
    for segment in segments {
        let next = openat(place.as_fd(), segment, flags | OFlag::O_PATH, Mode::empty());
        place = next.with_context(|| format!("open {segment:?} of {}", path.display()))?;
        if is_symlink(&place)? {
            bail!("unexpected symlink {segment:?} in {}", path.display());
        }
    }
    Ok(place)
}

/// Go's `filepath.EvalSymlinks`.
fn resolve(path: &Path) -> Result<std::path::PathBuf> {
    fs::canonicalize(path).with_context(|| format!("resolve {}", path.display()))
}

fn is_symlink(place: &OwnedFd) -> Result<bool> {
    let mode = fstat(place).context("look at an opened path")?.st_mode;
    Ok(SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFLNK)
}
