//! For this folder's tests: a directory of written files, cgroups of the real kernel, and the tests
//! that need them.

mod figures;
mod kills;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// Files like those of a cgroup, without the kernel.
pub struct Fixture(tempfile::TempDir);

impl Fixture {
    pub fn of(files: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        Self(directory)
    }

    pub fn directory(&self) -> &Path {
        self.0.path()
    }
}

/// Reports that a test is skipped, past the test runner's capture of `eprintln!`.
fn skipped(why: &str) {
    let name = thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {why}");
}

/// A cgroup and the processes in it; both are removed when it is dropped, in every case.
pub struct RealCgroup {
    directories: Vec<PathBuf>,
    children: Vec<Child>,
}

impl RealCgroup {
    /// A new cgroup in each hierarchy, given by the hierarchies' mount points. If a hierarchy is
    /// missing, returns `None` and reports a skip.
    pub fn new(hierarchies: &[&str]) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "bindguard-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let mut cgroup = Self {
            directories: Vec::new(),
            children: Vec::new(),
        };
        for hierarchy in hierarchies {
            let hierarchy = Path::new("/sys/fs/cgroup").join(hierarchy);
            let directory = hierarchy.join(&name);
            // mkdir(2) would also succeed in the tmpfs between the hierarchies.
            let made = fs::metadata(hierarchy.join("cgroup.procs"))
                .and_then(|_| fs::create_dir(&directory));
            if let Err(error) = made {
                skipped(&format!("no cgroup in {}: {error}", hierarchy.display()));
                return None;
            }
            cgroup.directories.push(directory);
        }
        Some(cgroup)
    }

    /// Makes a child cgroup in the first hierarchy.
    pub fn below(&self, name: &str) -> Self {
        let directory = self.path().join(name);
        fs::create_dir(&directory).unwrap();
        Self {
            directories: vec![directory],
            children: Vec::new(),
        }
    }

    /// Its directory in the first of the hierarchies.
    pub fn path(&self) -> &Path {
        &self.directories[0]
    }

    pub fn write(&self, file: &str, text: &str) {
        let path = self.path().join(file);
        fs::write(&path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
    }

    /// Runs a command in the cgroup, in all hierarchies; returns the pid.
    pub fn run(&mut self, command: &str) -> u32 {
        let script = format!("read go; {command}");
        let child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        let mut child = child.unwrap();
        let pid = child.id();
        for directory in &self.directories {
            fs::write(directory.join("cgroup.procs"), pid.to_string()).unwrap();
        }
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        self.children.push(child);
        pid
    }

    /// Waits for the first of its processes to end.
    pub fn wait(&mut self) {
        self.children.remove(0).wait().unwrap();
    }

    /// The number of this process's descriptors of files in it.
    pub fn open_files(&self) -> usize {
        let links = fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links
            .filter(|target| target.starts_with(self.path()))
            .count()
    }

    /// Ends the processes; the cgroup stays.
    pub fn end_all(&mut self) {
        for mut child in self.children.drain(..) {
            let _ = (child.kill(), child.wait());
        }
    }

    /// Ends the processes and removes the directories.
    pub fn remove(&mut self) {
        self.end_all();
        for directory in self.directories.drain(..) {
            remove(&directory);
        }
    }
}

impl Drop for RealCgroup {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A cgroup stays busy for a moment after its last process was reaped.
fn remove(directory: &Path) {
    for _ in 0..200 {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(10))
            }
            _ => return,
        }
    }
    eprintln!("a cgroup stays: {}", directory.display());
}
