//! Live refresh on a full node: all files of all pods at once, the window between the first and the
//! last file of a volume, the processor time for each file, and that of a survey.
//!
//! `make test` refreshes all files of ten pods. `make bench` measures 110 pods, as many as a
//! kubelet admits, and prints the figures.

use bindguard_integration::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

use bindguard_integration::footprint::processor_ticks;
use bindguard_integration::waiting::LIMIT;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const KEYS: [&str; 5] = ["0", "1", "2", "3", "4"];
const UPDATES: u32 = 10;

/// The updates of all files at once.
const BURSTS: u32 = 5;
/// For 550 files on a busy machine; docs/benchmarks.md has the goal for a quiet machine.
const BUDGET: Duration = Duration::from_secs(10);

#[test]
fn all_files_of_ten_pods_on_the_newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let started = start(node, &cri, 10)?;
        let _agent = Agent::start(node, "")?;
        for update in 1..=BURSTS {
            all_at_once(&started, update, None)?;
        }
        end(started, node, &cri)
    });
}

#[test]
#[ignore = "measures the programs of a release: make bench"]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(measure);
}

fn start(node: &Node, cri: &Cri, pods: u32) -> Result<Vec<RunningPod>> {
    (0..pods)
        .map(|number| RunningPod::start(node, cri, number))
        .collect()
}

fn end(pods: Vec<RunningPod>, node: &Node, cri: &Cri) -> Result<()> {
    pods.into_iter().try_for_each(|pod| pod.end(node, cri))
}

fn measure(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let started = start(node, &cri, 110)?;
    let agent = Agent::start(node, "")?;
    let account = CpuAccount::of(node, &agent)?;
    let mut windows = Vec::new();
    for update in 1..=UPDATES {
        windows.push(window_of(&started[0], update)?);
    }
    windows.sort();
    println!(
        "first to last of 5 files of a volume: median {:?}, longest {:?}",
        windows[windows.len() / 2],
        windows.last()
    );
    let mut bursts = Vec::new();
    for update in UPDATES + 1..=UPDATES + BURSTS {
        // The agent also checks all containers after its start, and each volume again a moment
        // after an update.
        until_idle(&agent)?;
        bursts.push(all_at_once(&started, update, account.as_ref())?);
    }
    bursts.sort();
    println!(
        "until the last one is read: median {:?}, longest {:?}",
        bursts[bursts.len() / 2],
        bursts.last()
    );
    drop((account, agent));
    println!(
        "a survey takes {:?} of processor time",
        cost_of_a_survey(node)?
    );
    let longest = bursts.last().context("a burst")?;
    ensure!(*longest < BUDGET, "{longest:?}");
    end(started, node, &cri)
}

/// An opted-in pod with a container that binds five files of a configMap.
struct RunningPod {
    uid: String,
    sandbox: Sandbox,
    volume: Volume,
    files: Vec<PathBuf>,
}

impl RunningPod {
    fn start(node: &Node, cri: &Cri, number: u32) -> Result<Self> {
        let uid = format!("uid-{number}");
        let pod = node.kubelet().pod(&uid)?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &content(0))?;
        let binds = (0..).zip(KEYS).map(|(index, key)| {
            Ok(mount(
                volume.subpath("app", index, key).bind()?,
                &format!("/etc/app/{key}"),
                PropagationPrivate,
            ))
        });
        let mounts = binds.collect::<Result<Vec<_>>>()?;
        let name = format!("pod-{number}");
        let sandbox =
            cri.run_annotated_pod("runc", &name, &uid, &[("bindguard.io/refresh", "true")])?;
        let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        let root = format!("/proc/{}/root/etc/app", cri.pid(&app)?);
        Ok(Self {
            uid,
            sandbox,
            volume,
            files: KEYS.iter().map(|key| Path::new(&root).join(key)).collect(),
        })
    }

    fn update(&self, number: u32) -> Result<()> {
        self.volume.update(&content(number))
    }

    fn end(&self, node: &Node, cri: &Cri) -> Result<()> {
        cri.remove_pod(&self.sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod(&self.uid)?.delete().is_ok())
        })
    }
}

/// The digits of a number as text that lives as long as the program: a volume's content is
/// borrowed.
fn content(number: u32) -> [(&'static str, &'static str); 5] {
    const NUMBERS: [&str; 16] = [
        "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
    ];
    KEYS.map(|key| (key, NUMBERS[number as usize]))
}

/// The time from the first to the last file that a reader in the container sees new.
fn window_of(pod: &RunningPod, update: u32) -> Result<Duration> {
    let (text, is_reading) = (update.to_string(), AtomicBool::new(false));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen: Vec<Option<Instant>> = vec![None; pod.files.len()];
            let start = Instant::now();
            while seen.iter().any(Option::is_none) && start.elapsed() < LIMIT {
                for (file, seen) in pod
                    .files
                    .iter()
                    .zip(&mut seen)
                    .filter(|(_, seen)| seen.is_none())
                {
                    *seen = fs::read_to_string(file)
                        .is_ok_and(|now| now == text)
                        .then(Instant::now);
                }
                is_reading.store(true, Ordering::Release);
            }
            seen
        });
        while !is_reading.load(Ordering::Acquire) {
            thread::yield_now();
        }
        pod.update(update)?;
        let seen = reader
            .join()
            .map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        let seen: Option<Vec<Instant>> = seen.into_iter().collect();
        let seen = seen.context("a file stays old")?;
        Ok(seen
            .iter()
            .max()
            .zip(seen.iter().min())
            .map(|(last, first)| *last - *first)
            .unwrap_or_default())
    })
}

/// The time until the last file is read. The reader polls with pauses: on a node with two
/// processors, a spinning reader takes half of the processors.
fn all_at_once(pods: &[RunningPod], update: u32, account: Option<&CpuAccount>) -> Result<Duration> {
    let before = account.map(CpuAccount::used).transpose()?;
    let began = Instant::now();
    pods.iter().try_for_each(|pod| pod.update(update))?;
    let written = began.elapsed();
    let text = update.to_string();
    for file in pods.iter().flat_map(|pod| &pod.files) {
        while fs::read_to_string(file)? != text {
            ensure!(began.elapsed() < LIMIT, "{} stays old", file.display());
            thread::sleep(Duration::from_millis(1));
        }
    }
    let (all, files) = (began.elapsed(), pods.len() * KEYS.len());
    println!(
        "{files} files of {} pods: written after {written:?}, the last one is read after {all:?}",
        pods.len()
    );
    if let (Some(account), Some(before)) = (account, before) {
        println!(
            "processor time: {:?} for each file",
            (account.used()? - before) / files as u32
        );
    }
    Ok(all)
}

/// The mean cost of a survey, with a survey each second.
fn cost_of_a_survey(node: &Node) -> Result<Option<Duration>> {
    let agent = Agent::start(node, "agent.survey-seconds = 1")?;
    let Some(account) = CpuAccount::of(node, &agent)? else {
        return Ok(None);
    };
    let surveys = || agent.figure("bindguard_agent_surveys_total");
    until("the first survey is over", || Ok(surveys() > 0.0))?;
    let (surveys_before, before) = (surveys(), account.used()?);
    thread::sleep(Duration::from_secs(10));
    Ok(Some(
        (account.used()? - before).div_f64(surveys() - surveys_before),
    ))
}

/// Waits until no volume was checked for a second.
fn until_idle(agent: &Agent) -> Result<()> {
    let mut used = processor_ticks(agent.pid())?;
    until("the agent is idle", || {
        thread::sleep(Duration::from_secs(1));
        let now = processor_ticks(agent.pid())?;
        let before = std::mem::replace(&mut used, now);
        Ok(now == before)
    })
}

/// The processor time of the agent and its children.
struct CpuAccount(PathBuf);

impl CpuAccount {
    /// `None` without the controller `cpuacct` of cgroup v1.
    fn of(node: &Node, agent: &Agent) -> Result<Option<Self>> {
        let group = Path::new("/sys/fs/cgroup/cpuacct").join(format!("{}-agent", node.name()));
        if fs::create_dir(&group).is_err() {
            return Ok(None);
        }
        fs::write(group.join("cgroup.procs"), agent.pid().to_string()).context("move the agent")?;
        Ok(Some(Self(group)))
    }

    fn used(&self) -> Result<Duration> {
        let text =
            fs::read_to_string(self.0.join("cpuacct.usage")).context("read the processor time")?;
        Ok(Duration::from_nanos(text.trim().parse()?))
    }
}

impl Drop for CpuAccount {
    fn drop(&mut self) {
        // Its processes end with the node; the group can be removed once they are elsewhere.
        let procs = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        let root = self.0.with_file_name("cgroup.procs");
        procs.lines().for_each(|pid| drop(fs::write(&root, pid)));
        let _ = fs::remove_dir(&self.0);
    }
}
