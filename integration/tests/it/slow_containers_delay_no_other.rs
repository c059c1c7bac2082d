//! Ten containers answer slowly, or have thousands of mounts. The refresh of a fast container does
//! not wait for the slow containers; `make bench` checks that this refresh is late by three seconds
//! at most.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use bindguard_integration::waiting::LIMIT;
use bindguard_testing::hostile_process::slow_fuse;
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

const DELAY: Duration = Duration::from_millis(900);
/// On a quiet machine, until the neighbour reads its new file.
const BUDGET: Duration = Duration::from_secs(3);

/// Binds the file a hundred times below a slow filesystem. `$1` is the descriptor of its device.
const SLOW: &str = "mkdir /slow && mount -t fuse -o fd=$1,rootmode=40000,user_id=0,group_id=0 slow /slow && \
    i=0; while [ $i -lt 100 ]; do mount --bind /etc/app.conf /slow/$i || exit 1; i=$((i+1)); done";
/// `$1` is the number of mounts.
const MANY: &str = "mkdir /many && cd /many && \
    i=0; while [ $i -lt $1 ]; do : > $i; mount --bind /etc/app.conf $i || exit 1; i=$((i+1)); done";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(|node| story(node, LIMIT, 1000));
}

#[test]
#[ignore = "measures the programs of a release: make bench"]
fn within_the_budget() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(|node| story(node, BUDGET, 5000));
}

fn story(node: &Node, limit: Duration, mounts: u32) -> Result<()> {
    let cri = node.cri()?;
    let neighbour = RunningPod::start(node, &cri, "neighbour")?;
    let mut hostile = Vec::new();
    for number in 0..10 {
        hostile.push(RunningPod::start(node, &cri, &format!("hostile-{number}"))?);
    }
    thread::scope(|scope| {
        let begin = |(number, pod)| {
            let pod: &RunningPod = pod;
            scope.spawn(move || match number {
                0..5 => pod.slow(),
                _ => pod.mounts(mounts),
            })
        };
        let all: Vec<_> = hostile.iter().enumerate().map(begin).collect();
        all.into_iter().try_for_each(|pod| {
            pod.join()
                .map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    })?;
    let agent = Agent::start(node, "")?;
    until("the first survey is over", || {
        Ok(agent.figure("bindguard_agent_surveys_total") > 0.0)
    })?;
    for text in ["one", "two", "three"] {
        hostile.iter().try_for_each(|pod| pod.update(text))?;
        let start = Instant::now();
        neighbour.update(text)?;
        while neighbour.reads()? != text {
            ensure!(
                start.elapsed() < limit,
                "the neighbour still reads its old file"
            );
            thread::sleep(Duration::from_millis(1));
        }
        let waits = |pod: &&RunningPod| pod.reads().is_ok_and(|old| old != text);
        ensure!(
            hostile.iter().filter(waits).count() > 0,
            "the neighbour waited for every other container"
        );
        if text == "one" {
            until("a child that hangs is listed", || {
                let status = agent.get("/v1/status");
                Ok(status.contains("container app\",\"id\":\"") && status.contains("hostile-"))
            })?;
        }
        println!("the neighbour reads {text} after {:?}", start.elapsed());
    }
    drop(agent);
    hostile
        .into_iter()
        .chain([neighbour])
        .try_for_each(|pod| pod.end(node, &cri))
}

struct RunningPod {
    uid: String,
    sandbox: Sandbox,
    volume: Volume,
    pid: u32,
}

impl RunningPod {
    fn start(node: &Node, cri: &Cri, name: &str) -> Result<Self> {
        let uid = format!("uid-{name}");
        let volume = node.kubelet().pod(&uid)?.volume(
            VolumeKind::ConfigMap,
            "conf",
            &[("app.conf", "zero")],
        )?;
        let bind = mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        );
        let sandbox =
            cri.run_annotated_pod("runc", name, &uid, &[("bindguard.io/refresh", "true")])?;
        let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &[bind])?;
        Ok(Self {
            uid,
            sandbox,
            volume,
            pid: cri.pid(&app)?,
        })
    }

    fn slow(&self) -> Result<()> {
        let device = Arc::new(
            File::options()
                .read(true)
                .write(true)
                .open("/dev/fuse")
                .context("open /dev/fuse")?,
        );
        let number = device.as_raw_fd().to_string();
        fcntl(&device, FcntlArg::F_SETFD(FdFlag::empty()))
            .context("keep the device across exec")?;
        let delay = slow_fuse::serve_after(Arc::clone(&device), DELAY);
        self.run(SLOW, &number)?;
        delay();
        Ok(())
    }

    fn mounts(&self, count: u32) -> Result<()> {
        self.run(MANY, &count.to_string())
    }

    /// In the container's mount namespace, with the privileges of the node.
    fn run(&self, script: &str, argument: &str) -> Result<()> {
        let mut command = Command::new("nsenter");
        command.args([
            "-t",
            &self.pid.to_string(),
            "-m",
            "--",
            "sh",
            "-c",
            script,
            "sh",
            argument,
        ]);
        run(command)?.success().map(drop)
    }

    fn update(&self, text: &'static str) -> Result<()> {
        self.volume.update(&[("app.conf", text)])
    }

    fn reads(&self) -> Result<String> {
        fs::read_to_string(format!("/proc/{}/root/etc/app.conf", self.pid))
            .context("read the neighbour's file")
    }

    fn end(&self, node: &Node, cri: &Cri) -> Result<()> {
        cri.remove_pod(&self.sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod(&self.uid)?.delete().is_ok())
        })
    }
}
