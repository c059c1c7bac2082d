//! `bindguard selftest`: whether this node's kernel and OCI runtimes do what bindguard relies on.
//!
//! The scenes run in a child with a pid namespace and a mount namespace of its own, on a tmpfs. The
//! kernel kills the child with its parent, and everything in both namespaces with the child: no
//! mount, process or file is left on the node, also if the self-test is killed.
//!
//! A pod of the scenes has a configMap with a single key, whose content is the number of its
//! version, and a subPath of that key. Updates follow the kubelet's `AtomicWriter`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Lines, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf, absolute};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::Outcome;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    HeldProcess, HelperProcess, PodVolumes, REPLACE_TIMEOUT, RefreshAct, TuckRecords, VolumeOfPod,
    rebind_volume, refresh_container,
};
use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_operator::doctor::{Check, DoctorReport, Point, PointStatus, kernel};
use bindguard_operator::node::is_root;
use bindguard_operator::root_program::{RootProgram, status_within};
use bindguard_sys::{kernel_features, read_mount_table};
use clap::Args;
use nix::sched::{CloneFlags, unshare};
use rustix::mount::{
    MountFlags, MountPropagationFlags as Propagation, UnmountFlags, mount, mount_bind,
    mount_change, mount_remount, unmount,
};
use rustix::process::{Pid, Signal, WaitOptions, chdir, pivot_root, waitpid};
use serde_json::json;

use crate::doctor;

/// A time limit against a kernel that hangs. All scenes take about a second, in an emulated machine a minute.
const TIMEOUT: Duration = Duration::from_secs(600);
/// A time limit for a call of an OCI runtime.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(30);
/// The last version of the file in each scene with a reader.
const UPDATES: u32 = 16;
/// The difference between the times of two kills; a whole refresh takes about 3 ms.
const KILL_STEP: Duration = Duration::from_micros(300);

const CGROUPS: &str = "/sys/fs/cgroup";
/// The place of the file in a container.
const PLACE: &str = "/etc/app/key";
/// The same in the folder of a pod.
const PLACE_OUTSIDE: &str = "root/etc/app/key";
const SUBPATH: &str = "pods/u/volume-subpaths/conf/app/0";
const VOLUME: &str = "pods/u/volumes/kubernetes.io~configmap/conf";
/// A spec with the ids of a user namespace.
const OWN_USERS: &str = r#"{"linux":{"namespaces":[{"type":"user"}],
    "uidMappings":[{"containerID":0,"hostID":0,"size":1}],
    "gidMappings":[{"containerID":0,"hostID":0,"size":1}]}}"#;

/// Arguments of `selftest`.
#[derive(Debug, Args)]
pub struct Selftest {
    /// Check this OCI runtime, beside the runc and crun on PATH.
    #[arg(long, value_name = "FILE")]
    runtime: Vec<PathBuf>,
    /// Print the points as JSON, for a bug report.
    #[arg(long)]
    json: bool,
    /// The part of a process that the self-test starts.
    #[arg(hide = true, trailing_var_arg = true)]
    part: Vec<String>,
}

impl Selftest {
    pub fn run(self) -> Result<ExitCode> {
        match &self.part[..] {
            [] => {}
            [part] if part == "scenes" => {
                return doctor::print(&run_scenes(&self.runtime)?, self.json);
            }
            [part, arguments @ ..] => {
                let line = run_part(part, arguments);
                let line = line.unwrap_or_else(|error| format!("{error:#}"));
                // a scene that failed reads no more
                let _ = writeln!(io::stdout(), "{line}");
                return Ok(ExitCode::SUCCESS);
            }
        }
        ensure!(is_root(), "run the self-test: this needs root");
        let mut command = Command::new("/proc/self/exe");
        command.arg("selftest").args(self.json.then_some("--json"));
        for runtime in &self.runtime {
            let path = absolute(runtime)?;
            let found = path.symlink_metadata();
            found.with_context(|| format!("run {}", path.display()))?;
            command.arg("--runtime").arg(path);
        }
        command.arg("scenes");
        // The child is the first process of the pid namespace.
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)
            .context("create namespaces for the self-test")?;
        let status = status_within(TIMEOUT, command).context("run the scenes")?;
        match status.code().map(u8::try_from) {
            Some(Ok(code)) => Ok(code.into()),
            _ => bail!("the scenes ended: {status}"),
        }
    }
}

/// The work of a process that a scene starts: a reader, on the host or in a container, or a refresh
/// that is killed.
fn run_part(part: &str, arguments: &[String]) -> Result<String> {
    let Some(pod) = arguments.first().cloned().map(Pod) else {
        // The program of a container of a real runtime.
        return Ok(fs::read_to_string(PLACE)?);
    };
    if let Some(init) = arguments.get(1) {
        let helper = HelperProcess::start().context("start the helper process")?;
        writeln!(io::stdout(), "ready")?;
        io::read_to_string(io::stdin())?;
        refresh(&helper, &pod, init.parse()?, "{}")?;
        return Ok(String::new());
    }
    if part == "host" {
        return read(&pod.at(SUBPATH));
    }
    enter_container(&pod, part == "own-users")?;
    let reads = read(PLACE)?;
    let opened = File::options().write(true).open(PLACE);
    ensure!(opened.is_err(), "the read-only bind became writable");
    Ok(reads)
}

/// Enters a mount namespace as a runtime makes one, with a read-only bind of the pod's subPath.
fn enter_container(pod: &Pod, has_own_users: bool) -> Result<()> {
    if has_own_users {
        unshare(CloneFlags::CLONE_NEWUSER)?;
        // user_namespaces(7): a process may map its own ids.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", "0 0 1")?;
        fs::write("/proc/self/gid_map", "0 0 1")?;
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount_change("/", Propagation::DOWNSTREAM | Propagation::REC)?;
    let (root, place) = (pod.at("root"), pod.at(PLACE_OUTSIDE));
    mount_bind(&root, &root)?;
    mount_bind(pod.at("shared"), pod.at("root/host"))?;
    mount_bind(pod.at(SUBPATH), &place)?;
    mount_remount(&place, MountFlags::BIND | MountFlags::RDONLY, "")?;
    mount_change(&place, Propagation::PRIVATE)?;
    chdir(&root)?;
    pivot_root(".", "old")?;
    unmount("/old", UnmountFlags::DETACH)?;
    Ok(chdir("/")?)
}

/// Reads the file until stdin has the number of the last version, and returns the number of reads.
/// Fails unless no read failed, none saw an older version again, and the last saw the last version.
fn read(file: &str) -> Result<String> {
    writeln!(io::stdout(), "ready")?;
    let input = thread::spawn(|| io::read_to_string(io::stdin()));
    let (mut reads, mut last, mut is_end) = (0, 0, false);
    while !is_end {
        is_end = input.is_finished();
        let text = fs::read_to_string(file).with_context(|| format!("after {reads} reads"))?;
        let version = text.parse::<u32>().context("read a truncated file")?;
        ensure!(version >= last, "a read saw version {version} after {last}");
        last = version;
        reads += 1;
    }
    let expected = input.join().ok().context("read stdin")??;
    ensure!(
        expected == last.to_string(),
        "the last read saw version {last}, not {expected}"
    );
    Ok(reads.to_string())
}

/// A process of the self-test.
struct Part {
    child: Child,
    out: Lines<BufReader<ChildStdout>>,
}

impl Part {
    /// Starts it, and waits until it is ready.
    fn start(part: &str, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .args(["selftest", part])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut out = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        let line = out.next().transpose()?.unwrap_or_default();
        ensure!(line == "ready", "{line}");
        Ok(Self { child, out })
    }

    fn mounts(&self) -> Result<String> {
        let file = format!("/proc/{}/mountinfo", self.child.id());
        Ok(fs::read_to_string(file)?)
    }

    /// Stops a reader that has to see this version last; returns its number of reads.
    fn stop(mut self, version: u32) -> Result<u32> {
        write!(self.child.stdin.take().context("no stdin")?, "{version}")?;
        let line = self.out.next().transpose()?.unwrap_or_default();
        line.parse().ok().with_context(|| line)
    }
}

/// Runs all scenes; this process is the first of its pid namespace.
fn run_scenes(runtimes: &[PathBuf]) -> Result<DoctorReport> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // Looked up first: a runtime may be in /run.
    let names = ["runc".into(), "crun".into()];
    let mut programs = Vec::new();
    for name in names.iter().chain(runtimes) {
        programs.extend(RootProgram::find(name, None).transpose());
    }
    isolate()?;
    let helper = HelperProcess::start().context("start the helper process")?;
    let mut check = kernel(&kernel_features(), Ok(true));
    let own_version = concat!("bindguard ", env!("CARGO_PKG_VERSION"), ", ");
    check.message.insert_str(0, own_version);
    let scene = |name, consequence, reader, step: Step<'_>| {
        point(name, consequence, || updates(name, reader, step))
    };
    let mut points = vec![
        Point {
            name: "kernel",
            check,
        },
        point(
            "mount-table",
            "bindguard judges no bind on this kernel, and creates go on unchecked",
            || {
                let mounts = read_mount_table()?.entries().len();
                passed(format!("{mounts} mounts are read"))
            },
        ),
        scene(
            "re-bind",
            "stale subPaths are not repaired before a container starts",
            "host",
            &|pod, _, _| pod.admit(),
        ),
        scene(
            "live-refresh",
            "live refresh is not available: restart pods to get an update",
            "container",
            &|pod, init, _| refresh(&helper, pod, init, "{}"),
        ),
        scene(
            "live-refresh-in-user-namespace",
            "live refresh is not available for pods with hostUsers: false",
            "own-users",
            &|pod, init, _| refresh(&helper, pod, init, OWN_USERS),
        ),
        scene(
            "killed-refresh",
            "an agent that is killed can leave a pod half refreshed: restart the pod then",
            "container",
            &|pod, init, version| killed_refresh(&helper, pod, init, version),
        ),
        point(
            "propagation",
            "binds of the host's root keep what the host unmounts",
            propagation,
        ),
    ];
    if programs.is_empty() {
        let why = "no runc and no crun on PATH: name a runtime with --runtime FILE";
        points.push(Point {
            name: "oci-runtime",
            check: Check::unknown(why),
        });
    }
    for program in programs {
        let pod = format!("runtime-{}", points.len());
        points.push(match program {
            Ok(program) => point(
                "oci-runtime",
                "containers of this runtime do not show what their spec says",
                || container_of_runtime(&program, &pod),
            ),
            // Such as a program that another user can change, which root does not run.
            Err(error) => Point {
                name: "oci-runtime",
                check: Check::unknown(format!("{error:#}")),
            },
        });
    }
    Ok(DoctorReport { points })
}

/// The result of a scene; an error is a failure.
type Found = Result<(PointStatus, String)>;

fn passed(text: String) -> Found {
    Ok((PointStatus::Ok, text))
}

/// The step after an update of the file: the pod, the pid of the reader, and the version.
type Step<'s> = &'s dyn Fn(&Pod, u32, u32) -> Result<()>;

/// Runs a scene; `consequence` is what follows from a failure for the node.
fn point(name: &'static str, consequence: &str, scene: impl FnOnce() -> Found) -> Point {
    let start = Instant::now();
    let (status, text) =
        scene().unwrap_or_else(|error| (PointStatus::Failed, format!("{error:#}; {consequence}")));
    let took = start.elapsed().as_millis();
    let mut check = Check::ok(format!("{text} ({took} ms)"));
    check.status = status;
    Point { name, check }
}

/// Nothing of the scenes reaches the node.
fn isolate() -> Result<()> {
    mount_change("/", Propagation::PRIVATE | Propagation::REC)?;
    for (kind, place) in [("proc", "/proc"), ("tmpfs", "/run")] {
        mount(kind, place, kind, MountFlags::empty(), None)
            .with_context(|| format!("mount {kind} at {place}"))?;
    }
    // As the folders of a kubelet: re-binds before Linux 6.5 work by propagation.
    mount_change("/run", Propagation::SHARED)?;
    // A runtime that cannot make a cgroup leaves none on the node.
    for place in read_mount_table()?.mount_points() {
        if place.starts_with(CGROUPS) {
            mount_remount(place, MountFlags::BIND | MountFlags::RDONLY, "")
                .with_context(|| format!("make {} read-only", place.display()))?;
        }
    }
    Ok(())
}

/// A pod in a folder of its own, which is also its kubelet's root.
struct Pod(String);

impl Pod {
    fn new(name: &str) -> Result<Self> {
        // The tmpfs hides the node's own /run.
        let pod = Self(format!("/run/selftest/{name}"));
        for folder in [
            "bundle",
            "shared/later",
            "root/etc/app",
            "root/host",
            "root/old",
            "root/dev",
            "root/proc",
            "pods/u/volume-subpaths/conf/app",
            VOLUME,
        ] {
            fs::create_dir_all(pod.at(folder))?;
        }
        let subpath = pod.at(SUBPATH);
        File::create(&subpath)?;
        File::create(pod.at(PLACE_OUTSIDE))?;
        pod.update(1)?;
        mount_bind(pod.at(VOLUME) + "/..data/key", &subpath)?;
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {
                "cwd": "/", "args": ["/bindguard", "selftest", "print"],
                "user": {"uid": 0, "gid": 0}, "noNewPrivileges": true,
            },
            "root": {"path": pod.at("root"), "readonly": true},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": PLACE, "type": "bind", "source": subpath,
                 "options": ["rbind", "rprivate", "ro"]},
            ],
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
        });
        fs::write(pod.at("bundle/config.json"), spec.to_string())?;
        Ok(pod)
    }

    fn at(&self, path: &str) -> String {
        format!("{}/{path}", self.0)
    }

    fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.0.clone().into()],
            ..Places::default()
        }
    }

    fn update(&self, version: u32) -> Result<()> {
        let volume = self.at(VOLUME);
        let link = format!("{volume}/..data");
        let new_link = format!("{volume}/..data_tmp");
        let old = fs::read_link(&link);
        let payload = format!("..2026_01_01_00_00_00.{version}");
        fs::create_dir(format!("{volume}/{payload}"))?;
        fs::write(format!("{volume}/{payload}/key"), version.to_string())?;
        symlink(payload, &new_link)?;
        fs::rename(new_link, link)?;
        if let Ok(old) = old {
            fs::remove_dir_all(Path::new(&volume).join(old))?;
        }
        Ok(())
    }

    /// The check of a create, which has to re-bind the subPath.
    fn admit(&self) -> Result<()> {
        let bundle = self.at("bundle");
        let report = admit(
            bundle.as_ref(),
            &Policy::default(),
            &self.places(),
            Attempt::First,
        )
        .report;
        if let Some(problem) = report.problems.first() {
            bail!("check a bundle: {problem}");
        }
        let outcome = report.binds.first().and_then(|bind| bind.outcome.as_ref());
        ensure!(
            matches!(outcome, Some(Outcome::Rebound { .. })),
            "the stale subPath was not re-bound: {outcome:?}"
        );
        Ok(())
    }
}

/// Updates a pod's file, and takes `step` after each update, while a reader reads without a pause.
fn updates(name: &str, reader: &str, step: Step<'_>) -> Found {
    let pod = Pod::new(name)?;
    let reader = match Part::start(reader, &[&pod.0]) {
        // Such as a node without user namespaces.
        Err(error) => return Ok((PointStatus::Unknown, format!("no reader starts: {error:#}"))),
        Ok(reader) => reader,
    };
    let count = || -> Result<_> {
        let here = read_mount_table()?.entries().len();
        Ok((here, reader.mounts()?.lines().count()))
    };
    let before = count()?;
    for version in 2..=UPDATES {
        pod.update(version)?;
        step(&pod, reader.child.id(), version)?;
    }
    let after = count()?;
    ensure!(
        after == before,
        "mounts of the host and of the reader: {after:?}, were {before:?}"
    );
    let reads = reader.stop(UPDATES)?;
    let updates = UPDATES - 1;
    passed(format!("{updates} updates, {reads} reads, none failed"))
}

/// Steps of the agent after an update: the host's subPath, then the container's mount.
fn refresh(helper: &HelperProcess, pod: &Pod, init: u32, spec: &str) -> Result<()> {
    let volume = VolumeOfPod {
        kubelet_root: pod.0.clone().into(),
        pod_uid: "u".to_owned(),
        volume: "conf".to_owned(),
    };
    let problems = rebind_volume(&volume, &Policy::default())
        .problems
        .join("; ");
    ensure!(problems.is_empty(), "re-bind the subPath: {problems}");
    let refreshed = refresh_container(
        helper,
        REPLACE_TIMEOUT,
        &HeldProcess::open(init)?,
        Some(&SpecUsers::from_spec(spec.as_bytes())?),
        &[&PodVolumes::open(&volume.pod_directory())?],
        RefreshAct::Replace(Notify::None),
        &TuckRecords::at(pod.at("tucks").as_ref()),
    )?;
    ensure!(
        refreshed.is_current(),
        "the mount was not replaced: {:?}",
        refreshed.mounts
    );
    Ok(())
}

/// A refresh that is killed, each time a little later after its start, and a refresh that finishes
/// the work.
fn killed_refresh(helper: &HelperProcess, pod: &Pod, init: u32, version: u32) -> Result<()> {
    let mut killed = Part::start("refresh", &[&pod.0, &init.to_string()])?;
    drop(killed.child.stdin.take());
    thread::sleep(KILL_STEP * version);
    killed.child.kill()?;
    killed.child.wait()?;
    refresh(helper, pod, init, "{}").context("after a kill")?;
    let shown = fs::read_to_string(format!("/proc/{init}/root{PLACE}"))?;
    ensure!(
        shown == version.to_string(),
        "after a kill version {shown} is shown, not {version}"
    );
    Ok(())
}

/// A bind with `HostToContainer` receives what the host mounts and unmounts.
fn propagation() -> Found {
    let pod = Pod::new("propagation")?;
    let container = Part::start("container", &[&pod.0])?;
    let place = pod.at("shared/later");
    let arrives = || -> Result<bool> { Ok(container.mounts()?.contains(" /host/later ")) };
    mount("tmpfs", &place, "tmpfs", MountFlags::empty(), None)?;
    ensure!(arrives()?, "a mount of the host does not arrive");
    unmount(&place, UnmountFlags::empty())?;
    ensure!(!arrives()?, "an umount of the host does not arrive");
    container.stop(1)?;
    passed("a mount and an umount of the host arrive".to_owned())
}

/// A container of a real runtime with a stale subPath: repaired, created, compared, started.
fn container_of_runtime(program: &RootProgram, pod: &str) -> Found {
    let version = program.output(&["--version"])?;
    let version = version.lines().next().unwrap_or_default();
    if !version.starts_with("crun") {
        // runc ignores the errors of read-only cgroups then.
        return create(program, version, "--rootless=true", pod);
    }
    // crun refuses hybrid cgroups, also when it uses none.
    mount("tmpfs", CGROUPS, "tmpfs", MountFlags::empty(), None).context("hide the cgroups")?;
    let found = create(program, version, "--cgroup-manager=disabled", pod);
    unmount(CGROUPS, UnmountFlags::empty()).context("show the cgroups")?;
    found
}

fn create(program: &RootProgram, version: &str, without_cgroup: &str, pod: &str) -> Found {
    let pod = Pod::new(pod)?;
    fs::copy("/proc/self/exe", pod.at("root/bindguard"))?;
    pod.update(2)?;
    pod.admit()?;
    let call = |verb: &str, options: &[&str]| -> Result<()> {
        let errors = pod.at("errors");
        let mut command = program.command();
        command
            .args([without_cgroup, "--root", &pod.at("state"), verb])
            .args(options)
            .arg("selftest")
            // The container keeps the streams of its create.
            .stdin(Stdio::null())
            .stdout(File::create(pod.at(verb))?)
            .stderr(File::create(&errors)?);
        let status = status_within(RUNTIME_TIMEOUT, command)?;
        let why = fs::read_to_string(errors)?;
        let why = why.trim();
        ensure!(status.success(), "{version} {verb}: {status}: {why}");
        Ok(())
    };
    let (bundle, pid) = (pod.at("bundle"), pod.at("pid"));
    if let Err(error) = call("create", &["--bundle", &bundle, "--pid-file", &pid]) {
        return Ok((PointStatus::Unknown, format!("{error:#}")));
    }
    let pid: i32 = fs::read_to_string(&pid)?.trim().parse()?;
    let report = prove_container(
        bundle.as_ref(),
        pid.unsigned_abs(),
        &Policy::default(),
        &pod.places(),
    )
    .report;
    call("start", &[])?;
    // This process is the first of its pid namespace: it adopted the container.
    waitpid(Pid::from_raw(pid), WaitOptions::empty())?;
    call("delete", &["--force"])?;
    let wrong = report.binds.first().and_then(|bind| bind.reason());
    if let Some(why) = wrong.or_else(|| report.problems.first().cloned()) {
        bail!("{version}: {why}");
    }
    ensure!(
        report.unproven == 0,
        "{version}: a bind could not be compared"
    );
    let shown = fs::read_to_string(pod.at("create"))?;
    let shown = shown.trim();
    ensure!(
        shown == "2",
        "{version}: the container shows version {shown:?}, not 2"
    );
    passed(format!("{version}: a stale subPath is repaired and shown"))
}
