//! The cost of the watch of the mount table, and the time until a container has a volume that was
//! mounted anew: on a node with 2,000 mounts, on which 20 pods start in a second.
//!
//! The limits leave room for a busy machine; the figures are printed with `--nocapture`.

use bindguard_integration::prelude::*;
use std::collections::VecDeque;

use bindguard_integration::footprint::processor_ticks;
use bindguard_integration::mount_calls::bind;
use bindguard_integration::scenes::delete_pod;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const MOUNTS: usize = 2000;
const STARTS_PER_SECOND: u32 = 20;
const MOUNTS_OF_START: usize = 10;
const LOAD: Duration = Duration::from_secs(10);
const ROUNDS: usize = 100;
const PODS: usize = 110;
/// containerd's folder, in which each container has a folder.
const TASKS: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";

#[test]
#[ignore = "measures the programs of a release: make bench"]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let many = node.disk().join("many");
        for number in 0..MOUNTS {
            let place = many.join(number.to_string());
            fs::create_dir_all(&place)?;
            bind(&place, &place)?;
        }
        // containerd makes its folder for the first container.
        let other = cri.run_pod("runc", "other", "uid-other")?;
        let agent = Agent::start(node, "")?;
        thread::sleep(Duration::from_secs(2));
        let without = share_during_starts(node, &agent)?;
        let first = RunningPod::start(node, &cri, "first")?;
        first.becomes_known()?;
        let with = share_during_starts(node, &agent)?;
        println!("{MOUNTS} mounts, {STARTS_PER_SECOND} starts/s: {without:.2} % of a processor; {with:.2} % with a pod that opted in");
        ensure!(with - without < 2.0, "{without} %, then {with} %");
        one_after_the_other(&first)?;
        all_at_once(node, &cri)?;
        cri.remove_pod(&first.sandbox)?;
        cri.remove_pod(&other)
    });
}

/// The percentage of a processor that the agent uses while pods start that did not opt in.
fn share_during_starts(node: &Node, agent: &Agent) -> Result<f64> {
    let (began, before) = (Instant::now(), processor_ticks(agent.pid())?);
    let (mut pods, mut number) = (VecDeque::new(), 0);
    while began.elapsed() < LOAD {
        pods.push_back(StartedPod::start(node, number)?);
        if pods.len() > STARTS_PER_SECOND as usize {
            pods.pop_front().map(StartedPod::end).transpose()?;
        }
        number += 1;
        let next = began + Duration::from_secs(1) / STARTS_PER_SECOND * number;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let ticks = processor_ticks(agent.pid())? - before;
    let share = ticks as f64 / began.elapsed().as_secs_f64();
    pods.into_iter().try_for_each(StartedPod::end)?;
    Ok(share)
}

/// The mounts and the folder that the start of a pod makes, without its processes.
struct StartedPod {
    volumes: PathBuf,
    task: PathBuf,
}

impl StartedPod {
    fn start(node: &Node, number: u32) -> Result<Self> {
        let pod = node.kubelet().pod(&format!("uid-load-{number}"))?;
        let started = Self {
            volumes: pod.path().join("volumes/kubernetes.io~csi"),
            task: Path::new(TASKS).join(format!("load-{number}")),
        };
        for place in started.places() {
            fs::create_dir_all(&place)?;
            tmpfs(&place, "size=4k")?;
        }
        fs::create_dir(&started.task)?;
        Ok(started)
    }

    fn places(&self) -> impl Iterator<Item = PathBuf> {
        (0..MOUNTS_OF_START).map(|volume| self.volumes.join(format!("pv-{volume}/mount")))
    }

    fn end(self) -> Result<()> {
        self.places().try_for_each(unmount)?;
        fs::remove_dir(&self.task)?;
        let pod = self.volumes.ancestors().nth(2).unwrap_or(&self.volumes);
        Ok(fs::remove_dir_all(pod)?)
    }
}

/// An opted-in pod with one volume.
struct RunningPod {
    uid: String,
    sandbox: Sandbox,
    volume: PathBuf,
    file: PathBuf,
}

impl RunningPod {
    fn start(node: &Node, cri: &Cri, name: &str) -> Result<Self> {
        let uid = format!("uid-{name}");
        let volume = node
            .kubelet()
            .pod(&uid)?
            .path()
            .join("volumes/kubernetes.io~csi/pv/mount");
        fs::create_dir_all(&volume)?;
        tmpfs(&volume, "")?;
        let opted_in = [("bindguard.io/refresh-binds", "volumes")];
        let sandbox = cri.run_annotated_pod("runc", name, &uid, &opted_in)?;
        let mounts = [mount(&volume, "/data", PropagationPrivate)];
        let id = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        let file = format!("/proc/{}/root/data/file", cri.pid(&id)?).into();
        Ok(Self {
            uid,
            sandbox,
            volume,
            file,
        })
    }

    fn mount_anew(&self, content: &str) -> Result<()> {
        host([
            "umount".as_ref(),
            "--lazy".as_ref(),
            self.volume.as_os_str(),
        ])?;
        tmpfs(&self.volume, "")?;
        Ok(fs::write(self.volume.join("file"), content)?)
    }

    fn is_current(&self, content: &str) -> bool {
        fs::read_to_string(&self.file).is_ok_and(|read| read == content)
    }

    /// The agent knows the pod once the first mount arrived.
    fn becomes_known(&self) -> Result<()> {
        self.mount_anew("first")?;
        until("the agent knows the pod", || Ok(self.is_current("first")))
    }
}

fn one_after_the_other(pod: &RunningPod) -> Result<()> {
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let content = round.to_string();
        pod.mount_anew(&content)?;
        let began = Instant::now();
        until("the container reads it", || Ok(pod.is_current(&content)))?;
        times.push(began.elapsed());
        // A list of the mounts is followed by a pause.
        thread::sleep(Duration::from_millis(300));
    }
    times.sort();
    let (median, last) = (times[ROUNDS / 2], times[ROUNDS * 99 / 100]);
    println!("mounted until visible: median {median:?}, 99th percentile {last:?}");
    ensure!(median < Duration::from_millis(200), "{median:?}");
    Ok(())
}

fn all_at_once(node: &Node, cri: &Cri) -> Result<()> {
    let pods = (0..PODS).map(|pod| RunningPod::start(node, cri, &format!("pod-{pod}")));
    let pods = pods.collect::<Result<Vec<_>>>()?;
    thread::sleep(Duration::from_secs(3));
    for content in ["two", "three"] {
        pods.iter().try_for_each(|pod| pod.mount_anew(content))?;
        let began = Instant::now();
        for pod in &pods {
            until("the container reads it", || Ok(pod.is_current(content)))?;
        }
        println!(
            "{PODS} pods: all current {:?} after the last mount",
            began.elapsed()
        );
        ensure!(began.elapsed() < Duration::from_secs(10));
    }
    for pod in pods {
        cri.remove_pod(&pod.sandbox)?;
        delete_pod(node, &pod.uid)?;
    }
    Ok(())
}
