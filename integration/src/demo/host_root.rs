//! Part two: a monitoring container has the host's `/` mounted, and the host wants a disk back
//! (containerd#3667).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::name;
use super::table::{Observation, Table};
use crate::ctr::{Bind, Runtime};
use crate::node::Node;
use crate::process::host;

const STEP: &str = "umount a disk under a container with `/`";

pub(super) fn show(node: &Node, table: &mut Table) -> Result<()> {
    println!(
        "\n3. A monitoring container mounts the host's `/` (rbind,rprivate). The host unmounts a disk and detaches it."
    );
    let mut observe = |runtime, want_released| -> Result<()> {
        let disk = Disk::attach(node.disk())?;
        // what does not happen is waited for in vain, what does takes as long as the machine lets
        // it
        let patience = Duration::from_secs(if want_released { 60 } else { 2 });
        let released = is_released_under(node, &disk, runtime, patience)?;
        let seen = if released {
            "released"
        } else {
            "stays attached until the container ends"
        };
        table.add(Observation {
            step: STEP,
            runtime: name(runtime),
            seen: seen.to_owned(),
            is_as_said: released == want_released,
        });
        Ok(())
    };
    observe(Runtime::Stock, false)?;
    observe(Runtime::Bindguard, true)
}

/// Plays the part with a runtime. At the end the container is gone, and its mounts too.
fn is_released_under(
    node: &Node,
    disk: &Disk,
    runtime: Runtime,
    patience: Duration,
) -> Result<bool> {
    println!("\n   {}:", name(runtime));
    let ctr = node.ctr();
    let host_root = Bind::new("/", "/host").options(&["rbind", "rprivate"]);
    ctr.container("monitor")
        .runtime(runtime)
        .mount(host_root)
        .start()?
        .success()?;
    disk.unmount_and_detach()?;
    println!(
        "   umount {} and losetup --detach {}: both say that all is well",
        disk.folder.display(),
        disk.device
    );
    let released = disk.is_released_within(patience);
    match released {
        true => println!(
            "   {} is free: the umount reached the container",
            disk.device
        ),
        false => println!(
            "   {} is still attached: the container holds a mount of it that is invisible from the host",
            disk.device
        ),
    }
    ctr.remove("monitor")?;
    if !disk.is_released_within(Duration::from_secs(60)) {
        println!(
            "   {} is attached even after the container's end",
            disk.device
        );
    }
    Ok(released)
}

/// A small ext4 filesystem on a loop device, mounted.
struct Disk {
    device: String,
    folder: PathBuf,
}

impl Disk {
    fn attach(place: &Path) -> Result<Self> {
        let (image, folder) = (place.join("disk.img"), place.join("disk"));
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let file = File::create(&image).with_context(|| format!("create {}", image.display()))?;
        file.set_len(16 << 20)
            .with_context(|| format!("enlarge {}", image.display()))?;
        let device = host([
            "losetup".as_ref(),
            "--find".as_ref(),
            "--show".as_ref(),
            image.as_os_str(),
        ])?
        .trim()
        .to_owned();
        host(["mkfs.ext4", "-q", "-F", &device])?;
        host(["mount".as_ref(), device.as_ref(), folder.as_os_str()])?;
        Ok(Self { device, folder })
    }

    fn unmount_and_detach(&self) -> Result<()> {
        host(["umount".as_ref(), self.folder.as_os_str()])?;
        host(["losetup", "--detach", &self.device]).map(drop)
    }

    /// `losetup --detach` returns 0 also while the device is in use; sysfs says what is true.
    fn is_released_within(&self, limit: Duration) -> bool {
        let name = self.device.trim_start_matches("/dev/");
        let attached = Path::new("/sys/block").join(name).join("loop/backing_file");
        let deadline = Instant::now() + limit;
        while attached.exists() {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(20));
        }
        true
    }
}
