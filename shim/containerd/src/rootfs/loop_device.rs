//! The `loop` option: a file with a filesystem becomes a block device while it is mounted.
//!
//! The kernel names a free device, but does not reserve the device: the first process that attaches
//! gets the device. After EBUSY the shim requests a new device. The device detaches the file by
//! itself after its last user (LO_FLAGS_AUTOCLEAR). The open descriptor is a user: the shim closes
//! the descriptor after the filesystem is mounted.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::kernel::{LoopMode, attach_loop_device, free_loop_device};

const CONTROL: &str = "/dev/loop-control";
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// An attached device.
#[derive(Debug)]
pub(super) struct LoopDevice {
    /// The device to mount.
    pub(super) path: PathBuf,
    _until_it_is_mounted: File,
}

impl LoopDevice {
    /// Attaches a file.
    pub(super) fn attach(file: &Path, mode: LoopMode) -> io::Result<Self> {
        let control = open(Path::new(CONTROL), true)?;
        let file = open(file, !mode.read_only)?;
        for _ in 0..TRIES {
            let path = PathBuf::from(format!("/dev/loop{}", free_loop_device(&control)?));
            let device = open(&path, !mode.read_only)?;
            match attach_loop_device(&device, &file, mode) {
                Ok(()) => {
                    return Ok(Self {
                        path,
                        _until_it_is_mounted: device,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "others were faster with every free loop device",
        ))
    }
}

fn open(path: &Path, writable: bool) -> io::Result<File> {
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("open {}: {error}", path.display()))
    };
    OpenOptions::new()
        .read(true)
        .write(writable)
        .open(path)
        .map_err(named)
}
