//! A "container" for tests: a process in a mount namespace and root of its own, which reads its
//! subpaths all the time if a test requires that.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{ContainerNamespace, HeldProcess};
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, chdir, fork, pivot_root};

/// A bind in a container.
pub struct Inside {
    source: PathBuf,
    destination: &'static str,
    is_folder: bool,
    is_writable: bool,
    has_mounts_below: bool,
}

impl Inside {
    pub fn of(source: PathBuf, destination: &'static str) -> Self {
        let is_folder = fs::metadata(&source).unwrap().is_dir();
        Self {
            source,
            destination,
            is_folder,
            is_writable: false,
            has_mounts_below: false,
        }
    }

    /// A writable folder with the mounts below: `rbind,rprivate`.
    pub fn tree(source: PathBuf, destination: &'static str) -> Self {
        Self {
            has_mounts_below: true,
            ..Self::writable(source, destination)
        }
    }

    /// As `of`, but writable for the container.
    pub fn writable(source: PathBuf, destination: &'static str) -> Self {
        Self {
            is_writable: true,
            ..Self::of(source, destination)
        }
    }
}

/// The message that makes the container read.
const READ: u8 = 1;

/// The observations of the reader in the container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    pub reads: u64,
    pub failed: u64,
    pub empty: u64,
    pub older: u64,
    pub last: u64,
}

/// The version of the running kernel: uname(2).
pub fn kernel() -> (u32, u32) {
    let release = nix::sys::utsname::uname()
        .unwrap()
        .release()
        .to_string_lossy()
        .into_owned();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

pub struct Container {
    pid: Pid,
    stop: Option<File>,
    seen: File,
    pub process: HeldProcess,
    spec: SpecUsers,
}

/// The spec of a container with these ids in a user namespace of its own, or with the user
/// namespace of its runtime.
pub fn spec_of(ids: Option<&str>) -> SpecUsers {
    let Some(ids) = ids else {
        return SpecUsers::from_spec(b"{}").unwrap();
    };
    let mut numbers = ids.split(' ');
    let mut next = || numbers.next().unwrap();
    let ids = format!(
        r#"[{{"containerID":{},"hostID":{},"size":{}}}]"#,
        next(),
        next(),
        next()
    );
    let linux =
        format!(r#"{{"namespaces":[{{"type":"user"}}],"uidMappings":{ids},"gidMappings":{ids}}}"#);
    // As for a volume of a pod with `hostUsers: false`.
    let mount = r#"{"destination":"/idmapped","options":["idmap"]}"#;
    SpecUsers::from_spec(format!(r#"{{"linux":{linux},"mounts":[{mount}]}}"#).as_bytes()).unwrap()
}

impl Container {
    /// Starts the container with these read-only binds, below its own root.
    pub fn start(root: &Path, binds: &[Inside]) -> Self {
        Self::start_with(root, binds, || {})
    }

    /// The same, in a user namespace of its own, with root as its only user.
    pub fn start_in_user_namespace(root: &Path, binds: &[Inside]) -> Self {
        Self::start_in_user_namespace_with(root, binds, || {})
    }

    /// The same; calls `more` in the container's namespace before the reader starts.
    pub fn start_in_user_namespace_with(
        root: &Path,
        binds: &[Inside],
        more: impl FnOnce(),
    ) -> Self {
        let mut container = Self::start_as(root, binds, &[], enter_user_namespace, more);
        container.spec = spec_of(Some("0 0 1"));
        container
    }

    /// As `start`; calls `more` in the container's namespace before the reader starts.
    pub fn start_with(root: &Path, binds: &[Inside], more: impl FnOnce()) -> Self {
        Self::start_as(root, binds, &[], || {}, more)
    }

    /// The same, with descriptors of the test open.
    pub fn start_keeping(
        root: &Path,
        binds: &[Inside],
        kept: &[BorrowedFd<'_>],
        more: impl FnOnce(),
    ) -> Self {
        Self::start_as(root, binds, kept, || {}, more)
    }

    fn start_as(
        root: &Path,
        binds: &[Inside],
        kept: &[BorrowedFd<'_>],
        before: impl FnOnce(),
        more: impl FnOnce(),
    ) -> Self {
        make_places(root, binds);
        let (stop_read, stop) = pipe();
        let (seen, seen_write) = pipe();
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
        // returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                drop((stop_read, seen_write));
                let mut seen = File::from(seen);
                seen.read_exact(&mut [0])
                    .expect("the container did not start");
                let process = HeldProcess::open(child.as_raw() as u32).unwrap();
                Self {
                    pid: child,
                    stop: Some(File::from(stop)),
                    seen,
                    process,
                    spec: spec_of(None),
                }
            }
            ForkResult::Child => {
                close_all_but(&[&[stop_read.as_fd(), seen_write.as_fd()], kept].concat());
                let work = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    before();
                    enter_root(root, binds);
                    more();
                    let mut out = File::from(seen_write);
                    out.write_all(&[1]).unwrap();
                    let seen = read_until_stopped(&File::from(stop_read), binds);
                    let numbers = [seen.reads, seen.failed, seen.empty, seen.older, seen.last];
                    numbers
                        .iter()
                        .for_each(|number| out.write_all(&number.to_ne_bytes()).unwrap());
                }));
                // SAFETY: ends the process without the exit handlers that it has from its parent.
                unsafe { nix::libc::_exit(if work.is_ok() { 0 } else { 1 }) }
            }
        }
    }

    /// The part of its spec that names user namespaces.
    pub fn spec(&self) -> &SpecUsers {
        &self.spec
    }

    pub fn namespace(&self) -> ContainerNamespace {
        self.process
            .mount_namespace()
            .unwrap()
            .accepted(&self.process, self.spec.namespace())
            .unwrap()
    }

    /// Calls `act` in a thread in the container's mount namespace, at the container's root.
    pub fn run_inside(&self, act: impl FnOnce() + Send) {
        let namespace = self.namespace();
        let enter = || {
            unshare(CloneFlags::CLONE_FS).unwrap();
            setns(&namespace, CloneFlags::CLONE_NEWNS).unwrap();
            act();
        };
        thread::scope(|scope| scope.spawn(enter).join().unwrap());
    }

    /// From now on the container reads the files of its binds without a pause.
    pub fn reading(mut self) -> Self {
        let stop = self.stop.as_mut().unwrap();
        stop.write_all(&[READ]).unwrap();
        self
    }

    /// Stops a container that is [reading](Self::reading), and returns the reader's observations.
    pub fn stop(mut self) -> Seen {
        drop(self.stop.take());
        let mut next = || {
            let mut bytes = [0; 8];
            self.seen.read_exact(&mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        };
        let seen = Seen {
            reads: next(),
            failed: next(),
            empty: next(),
            older: next(),
            last: next(),
        };
        assert!(seen.reads > 0, "nothing was read");
        seen
    }

    /// The content of a file, as the container sees it.
    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(format!("/proc/{}/root/{path}", self.pid)).ok()
    }

    /// The roots of its mounts at a place, and their options.
    pub fn mounts_at(&self, place: &str) -> Vec<(String, String)> {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid)).unwrap();
        let fields = table
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let here = fields.filter(|fields| fields[4] == place);
        here.map(|fields| (fields[3].to_owned(), fields[5].to_owned()))
            .collect()
    }

    /// The number of its mounts.
    pub fn mounts(&self) -> usize {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.pid))
            .unwrap()
            .lines()
            .count()
    }

    /// The optional fields of the mount at a place: its propagation.
    pub fn propagation_at(&self, place: &str) -> Vec<String> {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid)).unwrap();
        let line = table
            .lines()
            .rfind(|line| line.split(' ').nth(4) == Some(place))
            .unwrap();
        line.split(' ')
            .skip(6)
            .take_while(|field| *field != "-")
            .map(kind_of)
            .collect()
    }
}

/// `shared:12` without its number.
fn kind_of(field: &str) -> String {
    field.split(':').next().unwrap().to_owned()
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
    }
}

/// The mount points of these binds below a root.
pub fn make_places(root: &Path, binds: &[Inside]) {
    for bind in binds {
        let place = root.join(bind.destination);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        if bind.is_folder {
            fs::create_dir_all(place).unwrap();
        } else {
            fs::write(place, "").unwrap();
        }
    }
    fs::create_dir_all(root.join("old")).unwrap();
}

/// user_namespaces(7): a process may map its own ids.
fn enter_user_namespace() {
    unshare(CloneFlags::CLONE_NEWUSER).unwrap();
    fs::write("/proc/self/setgroups", "deny").unwrap();
    fs::write("/proc/self/uid_map", "0 0 1").unwrap();
    fs::write("/proc/self/gid_map", "0 0 1").unwrap();
}

/// A mount namespace of the calling process's own, with these binds, read-only, below this root.
pub fn enter_root(root: &Path, binds: &[Inside]) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    change("/".as_ref(), MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    mount(
        Some(root),
        root,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
    for bind in binds {
        let place = root.join(bind.destination);
        let below = match bind.has_mounts_below {
            true => MsFlags::MS_REC,
            false => MsFlags::empty(),
        };
        mount(
            Some(&bind.source),
            &place,
            None::<&str>,
            MsFlags::MS_BIND | below,
            None::<&str>,
        )
        .unwrap();
        let access = if bind.is_writable {
            MsFlags::empty()
        } else {
            MsFlags::MS_RDONLY
        };
        let attributes = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | access;
        mount(None::<&str>, &place, None::<&str>, attributes, None::<&str>).unwrap();
        change(&place, MsFlags::MS_PRIVATE | below);
    }
    chdir(root).unwrap();
    pivot_root(".", "old").unwrap();
    umount2("/old", MntFlags::MNT_DETACH).unwrap();
    chdir("/").unwrap();
}

pub fn change(place: &Path, to: MsFlags) {
    mount(None::<&str>, place, None::<&str>, to, None::<&str>).unwrap();
}

/// Binds a folder this many times, in the calling process's namespace and root.
pub fn make_mounts(count: usize) {
    make_tmpfs("/many");
    make_mounts_in("/many", count);
}

/// Binds a folder `count` times below names of 250 newlines. mountinfo prints 1,000 bytes for a
/// name: about 26 kB for each mount.
pub fn make_long_mounts(count: usize) {
    let name = "\n".repeat(250);
    make_tmpfs("/long");
    chdir("/long").unwrap();
    // The kernel accepts no longer path at once.
    for _ in 0..13 {
        fs::create_dir(&name).unwrap();
        chdir(name.as_str()).unwrap();
    }
    make_mounts_in(".", count);
    chdir("/").unwrap();
}

/// A mount below `depth` nested folders: mountinfo prints 1,001 bytes for each folder, all in the
/// same line.
pub fn make_deep_mount(depth: usize) {
    let name = "\n".repeat(250);
    make_tmpfs("/deep");
    chdir("/deep").unwrap();
    for _ in 0..depth {
        fs::create_dir(&name).unwrap();
        chdir(name.as_str()).unwrap();
    }
    make_mounts_in(".", 1);
    chdir("/").unwrap();
}

fn make_tmpfs(place: &str) {
    fs::create_dir(place).unwrap();
    mount(
        Some("tmpfs"),
        place,
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
}

/// Both paths of each line have the folder's name.
fn make_mounts_in(folder: &str, count: usize) {
    for number in 0..count {
        let place = Path::new(folder).join(number.to_string());
        fs::create_dir(&place).unwrap();
        mount(
            Some(folder),
            &place,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
    }
}

fn read_until_stopped(mut stop: &File, binds: &[Inside]) -> Seen {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut seen = Seen::default();
    if stop.read(&mut [0]).unwrap() == 0 {
        return seen;
    }
    let mut newest = vec![0; binds.len()];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    loop {
        let is_stopped = poll(&mut [PollFd::new(stop, PollFlags::HUP)], Some(&now)).unwrap() > 0;
        for (bind, newest) in binds.iter().zip(&mut newest) {
            let path = Path::new("/").join(bind.destination);
            let path = if bind.is_folder { path.join("0") } else { path };
            seen.reads += 1;
            match fs::read_to_string(path) {
                Err(_) => seen.failed += 1,
                Ok(text) if text.is_empty() => seen.empty += 1,
                Ok(text) => {
                    let number = text.trim().parse().unwrap_or(0);
                    seen.older += u64::from(number < *newest);
                    *newest = number;
                    seen.last = number;
                }
            }
        }
        if is_stopped {
            return seen;
        }
    }
}

/// Closes all descriptors above the standard streams except `kept`. The child has copies of the
/// other tests' descriptors: a pipe that never ends, or a FUSE device whose daemon never dies.
pub(crate) fn close_all_but(kept: &[BorrowedFd<'_>]) {
    let mut kept: Vec<u32> = kept.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept.into_iter().chain([u32::MAX]) {
        if first < fd {
            // SAFETY: nothing in this child uses a descriptor that is not in the list.
            let closed = unsafe { nix::libc::close_range(first, fd - 1, 0) };
            assert_eq!(closed, 0, "{}", std::io::Error::last_os_error());
        }
        first = fd.saturating_add(1);
    }
}

/// No program that a test starts meanwhile keeps an end open.
fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap()
}
