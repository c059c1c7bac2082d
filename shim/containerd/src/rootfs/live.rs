//! This folder's tests on the real kernel, each in a mount namespace of its own thread. Without the
//! right to mount they are reported as skipped.

use std::env;
use std::error::Error;
use std::fs::{self, create_dir};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use containerd_shim_protos::types::mount::Mount;
use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::{call, mount_all, unmount_all, unmount_and_remove};
use crate::work::Result;

/// The folder has an empty `rootfs` and is on the machine's own disk: not every filesystem supports
/// id-mapped mounts.
fn in_namespace(test: impl FnOnce(&Path) + Send + 'static) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    create_dir(path.join("rootfs")).unwrap();
    let finished = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        call(
            None,
            Path::new("/"),
            None,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None,
        )?;
        test(&path);
        io::Result::Ok(())
    });
    if let Err(error) = finished.join().unwrap() {
        skipped(&format!("no mount namespace: {error}"));
    }
}

/// Writes past the test runner's capture of `eprintln!`.
fn skipped(why: &str) {
    let name = thread::current()
        .name()
        .unwrap_or("a test of root filesystems")
        .to_owned();
    let _ = writeln!(io::stderr(), "SKIPPED {name}: {why}");
}

fn mount(kind: &str, source: &Path, target: &str, options: &str) -> Mount {
    Mount {
        type_: kind.to_owned(),
        source: source.display().to_string(),
        target: target.to_owned(),
        options: options.split(',').map(str::to_owned).collect(),
        ..Default::default()
    }
}

fn make(path: PathBuf) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    path
}

fn mounts_below(path: &Path) -> usize {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let path = path.display().to_string();
    table
        .lines()
        .filter(|line| {
            line.split(' ')
                .nth(4)
                .is_some_and(|place| place.starts_with(&path))
        })
        .count()
}

fn owner(path: &Path) -> (u32, u32) {
    let meta = fs::metadata(path).unwrap();
    (meta.uid(), meta.gid())
}

/// False, with a message, if this kernel or this filesystem has no id-mapped mounts.
fn can_map_ids(result: Result<()>) -> bool {
    let Err(error) = result else {
        return true;
    };
    let source = error.source().and_then(|source| source.downcast_ref());
    let kind = source.map(io::Error::kind);
    assert!(
        matches!(
            kind,
            Some(io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
        ),
        "{error:?}"
    );
    skipped(&format!("no id-mapped mounts: {error}"));
    false
}

const MAP: &str = "uidmap=0:100000:65536,gidmap=0:200000:65536";

#[test]
fn a_bind_with_other_ids() {
    in_namespace(|dir| {
        let (source, rootfs) = (make(dir.join("source")), dir.join("rootfs"));
        fs::write(source.join("file"), "").unwrap();
        if can_map_ids(mount_all(
            &[mount("bind", &source, "", &format!("rbind,ro,{MAP}"))],
            &rootfs,
        )) {
            assert_eq!(owner(&rootfs.join("file")), (100_000, 200_000));
            assert!(
                fs::write(rootfs.join("new"), "").is_err(),
                "it was to be read-only"
            );
            assert_eq!(mounts_below(&rootfs), 1);
            unmount_all(&rootfs).unwrap();
        }
        assert_eq!(mounts_below(dir), 0);
    });
}

#[test]
fn the_mount_point_is_removed_and_a_full_directory_stays() {
    in_namespace(|dir| {
        let rootfs = dir.join("rootfs");
        mount_all(&[mount("tmpfs", Path::new("t"), "", "ro")], &rootfs).unwrap();
        unmount_and_remove(&rootfs).unwrap();
        assert!(!rootfs.try_exists().unwrap());
        unmount_and_remove(&rootfs).unwrap();
        fs::write(make(rootfs.clone()).join("file"), "").unwrap();
        unmount_and_remove(&rootfs).unwrap();
        assert!(rootfs.join("file").try_exists().unwrap());
        assert_eq!(mounts_below(dir), 0);
    });
}

#[test]
fn an_overlay_with_other_ids() {
    in_namespace(|dir| {
        let rootfs = dir.join("rootfs");
        let [upper, work, low, high] =
            ["upper", "work", "s/1/fs", "s/2/fs"].map(|name| make(dir.join(name)));
        fs::write(low.join("low"), "").unwrap();
        fs::write(high.join("high"), "").unwrap();
        let options = format!(
            "{MAP},workdir={},upperdir={},lowerdir={}:{}",
            work.display(),
            upper.display(),
            high.display(),
            low.display()
        );
        if can_map_ids(mount_all(
            &[mount("overlay", Path::new("overlay"), "", &options)],
            &rootfs,
        )) {
            assert_eq!(owner(&rootfs.join("low")), (100_000, 200_000));
            assert_eq!(owner(&rootfs.join("high")), (100_000, 200_000));
            unmount_all(&rootfs).unwrap();
        }
        assert_eq!(mounts_below(dir), 0, "the mapped layers stay mounted");
        assert!(fs::metadata(dir.join(super::MAPPED_LAYERS)).is_err());
    });
}

#[test]
fn a_file_through_a_loop_device() {
    in_namespace(|dir| through_a_loop_device(dir, "loop,ro"));
}

/// On a filesystem without direct I/O the kernel attaches the file anyway, and uses the page cache.
#[test]
fn a_file_through_a_loop_device_without_the_page_cache() {
    in_namespace(|dir| through_a_loop_device(dir, "loop,direct-io,ro"));
}

fn through_a_loop_device(dir: &Path, options: &str) {
    let (image, rootfs) = (dir.join("image"), dir.join("rootfs"));
    fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let made = Command::new("/sbin/mkfs.ext4")
        .args(["-q", "-F"])
        .arg(&image)
        .status();
    if !made.is_ok_and(|status| status.success()) || fs::metadata("/dev/loop-control").is_err() {
        return skipped("no mkfs.ext4, or no loop devices");
    }
    mount_all(&[mount("ext4", &image, "", options)], &rootfs).unwrap();
    assert!(fs::metadata(rootfs.join("lost+found")).unwrap().is_dir());
    let devices = || attached_to(&image);
    assert_eq!(devices(), 1);
    assert_eq!(
        uses_direct_io(&image),
        options.contains("direct-io"),
        "{options}"
    );
    unmount_all(&rootfs).unwrap();
    // The device detaches when the last user has gone, which may be a moment later.
    let gone = (0..100).any(|_| {
        thread::sleep(std::time::Duration::from_millis(10));
        devices() == 0
    });
    assert!(gone, "the loop device stays");
}

fn uses_direct_io(file: &Path) -> bool {
    let devices = fs::read_dir("/sys/block")
        .unwrap()
        .flatten()
        .map(|device| device.path().join("loop"));
    let of_file = |device: &PathBuf| {
        fs::read_to_string(device.join("backing_file"))
            .is_ok_and(|name| name.trim() == file.display().to_string())
    };
    let flag = devices
        .filter(of_file)
        .find_map(|device| fs::read_to_string(device.join("dio")).ok());
    flag.unwrap().trim() == "1"
}

fn attached_to(file: &Path) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let backing = devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok());
    backing
        .filter(|name| name.trim() == file.display().to_string())
        .count()
}

#[test]
fn a_mount_below_another() {
    in_namespace(|dir| {
        let (base, data, rootfs) = (
            make(dir.join("base")),
            make(dir.join("data")),
            dir.join("rootfs"),
        );
        create_dir(base.join("volume")).unwrap();
        fs::write(data.join("file"), "").unwrap();
        mount_all(
            &[
                mount("bind", &base, "", "rbind"),
                mount("bind", &data, "/volume", "rbind"),
            ],
            &rootfs,
        )
        .unwrap();
        assert!(fs::metadata(rootfs.join("volume/file")).unwrap().is_file());
        unmount_all(&rootfs).unwrap();
        assert_eq!(mounts_below(dir), 0);
    });
}

#[test]
fn failed_mounts_leave_nothing_mounted() {
    in_namespace(|dir| {
        let (base, rootfs) = (make(dir.join("base")), dir.join("rootfs"));
        let wrong = mount("bind", &dir.join("missing"), "", "rbind");
        let error = mount_all(&[mount("bind", &base, "", "rbind"), wrong], &rootfs).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("failed to mount rootfs component: mount bind "),
            "{error}"
        );
        assert_eq!(mounts_below(dir), 0);
    });
}

/// As under a rootless containerd: the flags of the volume are locked. The test runs itself again
/// in such a namespace.
#[test]
fn a_read_only_bind_in_a_user_namespace() {
    const FOLDER: &str = "BINDGUARD_TEST_FOLDER";
    if let Some(folder) = env::var_os(FOLDER) {
        let (folder, flags) = (Path::new(&folder), ["rbind,ro", "bind,ro,relatime"]);
        let rootfs = folder.join("rootfs");
        for options in flags {
            mount_all(
                &[mount("bind", &folder.join("volume"), "", options)],
                &rootfs,
            )
            .unwrap();
            let has = statvfs(&rootfs).unwrap().flags();
            assert!(
                has.contains(FsFlags::ST_RDONLY | FsFlags::ST_NOSUID | FsFlags::ST_NODEV),
                "{has:?}"
            );
            unmount_all(&rootfs).unwrap();
        }
        return;
    }
    in_namespace(|folder| {
        let volume = make(folder.join("volume"));
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
        call(
            Some(Path::new("tmpfs")),
            &volume,
            Some("tmpfs"),
            flags,
            None,
        )
        .unwrap();
        let in_user_namespace = |program: &Path, words: &[&str]| {
            let mut command = Command::new("unshare");
            command
                .args(["--user", "--map-root-user", "--mount"])
                .arg(program)
                .args(words)
                .env(FOLDER, folder);
            command.output().unwrap()
        };
        if !in_user_namespace(Path::new("true"), &[]).status.success() {
            return skipped("no user namespace");
        }
        let words = [
            "--exact",
            "rootfs::live::a_read_only_bind_in_a_user_namespace",
            "--nocapture",
        ];
        let inside = in_user_namespace(&env::current_exe().unwrap(), &words);
        assert!(
            inside.status.success(),
            "{}",
            String::from_utf8_lossy(&inside.stderr)
        );
        assert!(String::from_utf8_lossy(&inside.stdout).contains("1 passed"));
    });
}
