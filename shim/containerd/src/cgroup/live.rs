//! For this folder's tests: a directory of written files, cgroups of the real kernel, and the tests
//! that need them.

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

mod figures {
    //! The figures of real cgroups.

    use std::fs;

    use containerd_shim_protos::{cgroups, cgroups_v2};
    use protobuf::Message;

    use super::{RealCgroup, skipped};
    use crate::cgroup::{Cgroup, Controllers, figures, find};

    /// exec replaces the first shell, whose memory is charged to a different cgroup.
    const BUSY: &str = "exec sh -c 'while :; do :; done'";
    const V1: [&str; 5] = ["memory", "cpu", "cpuacct", "pids", "blkio"];

    #[test]
    fn a_process_in_version_1_has_all_figures_while_it_lives_and_afterwards() {
        let Some(mut cgroup) = RealCgroup::new(&V1) else {
            return;
        };
        cgroup.write("memory.limit_in_bytes", "67108864");
        let pid = cgroup.run(BUSY);
        let found = find(pid).unwrap();
        let Cgroup::V1(controllers) = &found else {
            panic!("{found:?}")
        };
        assert_eq!(controllers["memory"], cgroup.path());

        wait_until(|| v1_of(&found).cpu.usage.user > 0 && v1_of(&found).memory.usage.usage > 0);
        let metrics = v1_of(&found);
        assert!(metrics.cpu.usage.total > 0 && !metrics.cpu.usage.per_cpu.is_empty());
        assert!(
            metrics.cpu.throttling.is_some()
                && metrics.blkio.is_some()
                && metrics.memory_oom_control.is_some()
        );
        assert_eq!(
            (
                metrics.memory.usage.limit,
                metrics.memory.hierarchical_memory_limit
            ),
            (67_108_864, 67_108_864)
        );
        assert!(
            metrics.memory.usage.usage > 0
                && metrics.memory.usage.max >= metrics.memory.usage.usage
        );
        assert_eq!((metrics.pids.current, metrics.pids.limit), (1, 0));
        // The kernel updates these totals every two seconds.
        wait_until(|| v1_of(&found).memory.total_pg_fault > 0);
        assert!(!found.metrics().unwrap().value.is_empty());

        cgroup.end_all();
        assert!(
            v1_of(&found).cpu.usage.total >= metrics.cpu.usage.total,
            "the dead have figures"
        );
        cgroup.remove();
        assert_eq!(found.metrics(), None);
    }

    #[test]
    fn without_a_memory_controller_there_is_still_processor_time() {
        let Some(mut cgroup) = RealCgroup::new(&["cpuacct"]) else {
            return;
        };
        cgroup.run("exec sleep 60");
        let controllers = Controllers::from([("cpuacct", cgroup.path().to_owned())]);
        let metrics = v1_of(&Cgroup::V1(controllers));
        assert!(metrics.cpu.usage.is_some() && metrics.memory.is_none() && metrics.pids.is_none());
    }

    #[test]
    fn the_unified_hierarchy_has_processor_time_and_pressure_without_controllers() {
        let Some(mut cgroup) = RealCgroup::new(&["unified"]) else {
            return;
        };
        cgroup.run(BUSY);
        let figures = || {
            let metrics = figures::of_version_2(cgroup.path());
            cgroups_v2::metrics::Metrics::parse_from_bytes(&metrics.0).unwrap()
        };
        wait_until(|| figures().cpu.usage_usec > 0);
        let metrics = figures();
        match fs::read_to_string(cgroup.path().join("cpu.pressure")) {
            Ok(_) => assert!(metrics.cpu.psi.some.is_some()),
            Err(error) => skipped(&format!("no pressure here: {error}")),
        }
        let has_memory = fs::read_to_string(cgroup.path().join("memory.events")).is_ok();
        assert_eq!(
            (metrics.memory.is_some(), metrics.memory_events.is_some()),
            (has_memory, has_memory)
        );
    }

    fn v1_of(cgroup: &Cgroup) -> cgroups::metrics::Metrics {
        match cgroup {
            Cgroup::V1(controllers) => {
                cgroups::metrics::Metrics::parse_from_bytes(&figures::of_version_1(controllers).0)
                    .unwrap()
            }
            Cgroup::V2(directory) => panic!("{directory:?}"),
        }
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !is_so() {
            assert!(std::time::Instant::now() < end, "waited in vain");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

mod kills {
    //! Real out-of-memory kills, in cgroups of version 1 with a small limit.

    use std::time::{Duration, Instant};

    use bindguard_core::error_chain;
    use tokio::time::timeout;

    use super::{RealCgroup, skipped};
    use crate::cgroup::{Cgroup, Controllers, OomWatch};

    const LONG: Duration = Duration::from_secs(60);
    /// Longer than all checks after an alarm together.
    const QUIET: Duration = Duration::from_secs(3);
    /// Allocates without limit: tail keeps a whole line, and no line ends.
    const EAT: &str = "exec tail /dev/zero";
    const REST: &str = "exec sleep 60";

    /// A memory cgroup with a limit of 16 MiB, with swap or without.
    fn limited() -> Option<RealCgroup> {
        let cgroup = RealCgroup::new(&["memory"])?;
        if !cgroup
            .path()
            .join("memory.oom_control")
            .try_exists()
            .unwrap()
        {
            skipped("no memory controller of version 1");
            return None;
        }
        cgroup.write("memory.limit_in_bytes", "16777216");
        if cgroup
            .path()
            .join("memory.memsw.limit_in_bytes")
            .try_exists()
            .unwrap()
        {
            cgroup.write("memory.memsw.limit_in_bytes", "16777216");
        }
        Some(cgroup)
    }

    fn watch(cgroup: &RealCgroup) -> OomWatch {
        let controllers = Controllers::from([("memory", cgroup.path().to_owned())]);
        OomWatch::open(&Cgroup::V1(controllers)).unwrap()
    }

    #[tokio::test]
    async fn a_kill_is_reported_once_and_the_watch_ends_with_the_cgroup() {
        let Some(mut cgroup) = limited() else { return };
        let mut ooms = watch(&cgroup);
        assert!(!ooms.take_unreported());
        cgroup.run(EAT);
        assert!(timeout(LONG, ooms.next()).await.unwrap());
        cgroup.wait();
        assert!(!ooms.take_unreported());
        cgroup.remove();
        assert!(!timeout(LONG, ooms.next()).await.unwrap());
        assert!(!timeout(LONG, ooms.next()).await.unwrap());
        assert!(!ooms.take_unreported());
    }

    #[tokio::test]
    async fn the_kill_of_a_reaped_victim_is_reported() {
        let Some(mut cgroup) = limited() else { return };
        let mut ooms = watch(&cgroup);
        for _ in 0..3 {
            cgroup.run(EAT);
            cgroup.wait();
            assert!(ooms.take_unreported());
            assert!(!ooms.take_unreported());
        }
        cgroup.run(EAT);
        cgroup.wait();
        assert!(timeout(LONG, ooms.next()).await.unwrap());
        assert!(timeout(QUIET, ooms.next()).await.is_err());
    }

    #[tokio::test]
    async fn a_neighbour_killed_by_the_limit_of_the_pod_is_not_reported() {
        let Some(pod) = limited() else { return };
        let (mut eater, mut neighbour) = (pod.below("eater"), pod.below("neighbour"));
        let (mut of_eater, mut of_neighbour) = (watch(&eater), watch(&neighbour));
        neighbour.run(REST);
        eater.run(EAT);
        assert!(timeout(LONG, of_eater.next()).await.unwrap());
        eater.wait();
        assert!(timeout(QUIET, of_neighbour.next()).await.is_err());
        assert!(!of_neighbour.take_unreported());
    }

    #[tokio::test]
    async fn a_kill_in_a_cgroup_below_is_reported() {
        let Some(container) = limited() else { return };
        let mut below = container.below("below");
        let mut ooms = watch(&container);
        below.run(EAT);
        assert!(timeout(LONG, ooms.next()).await.unwrap());
        below.wait();
        assert!(!ooms.take_unreported());
    }

    #[tokio::test]
    async fn lack_of_memory_is_reported_where_kills_are_disabled() {
        let Some(mut cgroup) = limited() else { return };
        cgroup.write("memory.oom_control", "1");
        let mut ooms = watch(&cgroup);
        cgroup.run(EAT);
        assert!(timeout(LONG, ooms.next()).await.unwrap());
    }

    #[tokio::test]
    async fn a_cancelled_wait_loses_no_kill() {
        let Some(mut cgroup) = limited() else { return };
        let mut ooms = watch(&cgroup);
        cgroup.run(EAT);
        let begin = Instant::now();
        while timeout(Duration::from_micros(500), ooms.next()).await != Ok(true) {
            assert!(begin.elapsed() < LONG, "it is never reported");
        }
        let end = Instant::now() + QUIET;
        while Instant::now() < end {
            assert!(
                timeout(Duration::from_micros(500), ooms.next())
                    .await
                    .is_err(),
                "it is reported again"
            );
        }
    }

    #[tokio::test]
    async fn an_end_without_a_kill_reports_nothing() {
        let Some(mut cgroup) = limited() else { return };
        let mut ooms = watch(&cgroup);
        cgroup.run("exit 3");
        cgroup.wait();
        assert!(!ooms.take_unreported());
        cgroup.remove();
        assert!(!timeout(LONG, ooms.next()).await.unwrap());
        assert!(!ooms.take_unreported());
    }

    #[tokio::test]
    async fn the_cgroup_has_no_open_descriptor_afterwards() {
        let Some(cgroup) = limited() else { return };
        let _watch = watch(&cgroup);
        assert_eq!(cgroup.open_files(), 0);
    }

    #[tokio::test]
    async fn a_missing_memory_controller_is_an_error() {
        let nothing = OomWatch::open(&Cgroup::V1(Controllers::default()));
        let message = "watch for out-of-memory kills: the cgroup has no memory controller";
        assert_eq!(error_chain(&nothing.err().unwrap()), message);
        let directory = super::Fixture::of(&[]);
        let nothing = OomWatch::open(&Cgroup::V2(directory.directory().to_owned()));
        assert_eq!(error_chain(&nothing.err().unwrap()), message);
    }
}
