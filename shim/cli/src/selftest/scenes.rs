//! The scenes of the self-test, in namespaces of their own.
//!
//! A pod of the scenes has a configMap with a single key, whose content is the number of its
//! version, and a subPath of that key. Updates follow the kubelet's `AtomicWriter`.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::Outcome;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    HeldProcess, HelperProcess, PodVolumes, RefreshAct, TuckRecords, VolumeOfPod, rebind_volume,
    refresh_container,
};
use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_operator::doctor::{DoctorReport, Point, PointStatus, kernel};
use bindguard_operator::root_program::{RootProgram, status_within};
use bindguard_sys::{kernel_features, read_mount_table};
use nix::mount::{MsFlags, mount, umount};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use serde_json::json;

use crate::selftest::{PLACE, Part};

const CGROUPS: &str = "/sys/fs/cgroup";
/// The last version of the file in each scene with a reader.
const UPDATES: u64 = 16;
/// The difference between the times of two kills; a whole refresh takes about 3 ms.
const KILL_STEP: Duration = Duration::from_micros(300);
/// A time limit for a call of an OCI runtime.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(30);

/// The result of a scene; an error is a failure.
type Found = Result<(PointStatus, String)>;

/// Runs all scenes; this process is the first of its pid namespace.
pub(super) fn run(runtimes: &[PathBuf]) -> Result<DoctorReport> {
    set_pdeathsig(Signal::SIGKILL)?;
    // Looked up first: a runtime may be in /run.
    let names = [PathBuf::from("runc"), PathBuf::from("crun")];
    let mut programs = Vec::new();
    for name in names.iter().chain(runtimes) {
        programs.extend(RootProgram::find(name, None).transpose());
    }
    isolate()?;
    let helper = HelperProcess::start().context("start the helper process")?;
    let mut kernel = kernel(&kernel_features(), Ok(true));
    kernel.message = format!(
        "bindguard {}, {}",
        env!("CARGO_PKG_VERSION"),
        kernel.message
    );
    let mut points = vec![
        kernel,
        point(
            "mount-table",
            "bindguard judges no bind on this kernel, and creates go on unchecked",
            || {
                Ok((
                    PointStatus::Ok,
                    format!("{} mounts are read", read_mount_table()?.entries().len()),
                ))
            },
        ),
        point(
            "re-bind",
            "stale subPaths are not repaired before a container starts",
            || updates("host", "host", &|pod, _, _| pod.admit()),
        ),
        point(
            "live-refresh",
            "live refresh is not available: restart pods to get an update",
            || {
                updates("live", "container", &|pod, init, _| {
                    refresh(&helper, pod, init, None)
                })
            },
        ),
        point(
            "live-refresh-in-user-namespace",
            "live refresh is not available for pods with hostUsers: false",
            || {
                updates("own-users", "own-users", &|pod, init, _| {
                    refresh(&helper, pod, init, Some(OWN_USERS))
                })
            },
        ),
        point(
            "killed-refresh",
            "an agent that is killed can leave a pod half refreshed: restart the pod then",
            || {
                updates("killed", "container", &|pod, init, version| {
                    killed_refresh(&helper, pod, init, version)
                })
            },
        ),
        point(
            "propagation",
            "binds of the host's root keep what the host unmounts",
            propagation,
        ),
    ];
    if programs.is_empty() {
        let why = "no runc and no crun on PATH: name a runtime with --runtime FILE";
        points.push(Point::unknown("oci-runtime", why));
    }
    for (number, program) in programs.into_iter().enumerate() {
        points.push(match program {
            Ok(program) => point(
                "oci-runtime",
                "containers of this runtime do not show what their spec says",
                || container_of_runtime(&program, number),
            ),
            // Such as a program that another user can change, which root does not run.
            Err(error) => Point::unknown("oci-runtime", format!("{error:#}")),
        });
    }
    Ok(DoctorReport { points })
}

/// Runs a scene; `consequence` is what follows from a failure for the node.
fn point(name: &'static str, consequence: &str, scene: impl FnOnce() -> Found) -> Point {
    let start = Instant::now();
    let (status, text) =
        scene().unwrap_or_else(|error| (PointStatus::Failed, format!("{error:#}; {consequence}")));
    Point {
        name,
        status,
        message: format!("{text} ({} ms)", start.elapsed().as_millis()),
        command: None,
    }
}

/// Nothing of the scenes reaches the node.
fn isolate() -> Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
    for (kind, place) in [("proc", "/proc"), ("tmpfs", "/run")] {
        mount(Some(kind), place, Some(kind), MsFlags::empty(), none)
            .with_context(|| format!("mount {kind} at {place}"))?;
    }
    // As the folders of a kubelet: re-binds before Linux 6.5 work by propagation.
    mount(none, "/run", none, MsFlags::MS_SHARED, none)?;
    // A runtime that cannot make a cgroup leaves none on the node.
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    for place in read_mount_table()?.mount_points() {
        if place.starts_with(CGROUPS) {
            mount(none, place, none, read_only, none)
                .with_context(|| format!("make {} read-only", place.display()))?;
        }
    }
    Ok(())
}

/// A pod in a folder of its own.
pub(super) struct Pod(PathBuf);

impl Pod {
    /// The pod with this folder, which the process of the scenes made.
    pub(super) fn at(folder: &str) -> Self {
        Self(folder.into())
    }

    fn new(name: &str) -> Result<Self> {
        // The tmpfs hides the node's own /run.
        let pod = Self(Path::new("/run/selftest").join(name));
        let subpath = pod.subpath();
        for folder in [
            "bundle",
            "shared/later",
            "root/etc/app",
            "root/host",
            "root/old",
        ] {
            fs::create_dir_all(pod.0.join(folder))?;
        }
        for folder in [
            pod.root().join("dev"),
            pod.root().join("proc"),
            pod.volume(),
        ] {
            fs::create_dir_all(folder)?;
        }
        fs::create_dir_all(subpath.with_file_name(""))?;
        for file in [&subpath, &pod.root().join(&PLACE[1..])] {
            File::create(file)?;
        }
        pod.update(1)?;
        let (key, none) = (pod.volume().join("..data/key"), None::<&str>);
        mount(Some(&key), &subpath, none, MsFlags::MS_BIND, none)?;
        let options = ["rbind", "rprivate", "ro"];
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {
                "cwd": "/", "args": ["/bindguard", "selftest", "print"],
                "user": {"uid": 0, "gid": 0}, "noNewPrivileges": true,
            },
            "root": {"path": pod.root(), "readonly": true},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": PLACE, "type": "bind", "source": subpath, "options": options},
            ],
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
        });
        fs::write(pod.0.join("bundle/config.json"), spec.to_string())?;
        Ok(pod)
    }

    pub(super) fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    /// A folder of the host below which mounts are made later.
    pub(super) fn shared(&self) -> PathBuf {
        self.0.join("shared")
    }

    pub(super) fn subpath(&self) -> PathBuf {
        self.0.join("kubelet/pods/uid-1/volume-subpaths/conf/app/0")
    }

    fn volume(&self) -> PathBuf {
        self.0
            .join("kubelet/pods/uid-1/volumes/kubernetes.io~configmap/conf")
    }

    fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.0.join("kubelet")],
            ..Places::default()
        }
    }

    fn update(&self, version: u64) -> Result<()> {
        let volume = self.volume();
        let old = fs::read_link(volume.join("..data"));
        let payload = format!("..2026_01_01_00_00_00.{version}");
        fs::create_dir(volume.join(&payload))?;
        fs::write(volume.join(&payload).join("key"), version.to_string())?;
        symlink(&payload, volume.join("..data_tmp"))?;
        fs::rename(volume.join("..data_tmp"), volume.join("..data"))?;
        if let Ok(old) = old {
            fs::remove_dir_all(volume.join(old))?;
        }
        Ok(())
    }

    /// The check of a create, which has to re-bind the subPath.
    fn admit(&self) -> Result<()> {
        let bundle = self.0.join("bundle");
        let report = admit(&bundle, &policy(), &self.places(), Attempt::First).report;
        if let Some(problem) = report.problems.first() {
            bail!("check a bundle: {problem}");
        }
        let outcome = report.binds.first().and_then(|bind| bind.outcome.as_ref());
        let is_rebound = matches!(outcome, Some(Outcome::Rebound { .. }));
        ensure!(
            is_rebound,
            "the stale subPath was not re-bound: {outcome:?}"
        );
        Ok(())
    }
}

fn policy() -> Policy {
    Policy {
        proof: Alarm::Report,
        ..Policy::default()
    }
}

/// Updates a pod's file, and takes `step` after each update, while a reader reads without a pause.
fn updates(name: &str, reader: &str, step: &dyn Fn(&Pod, u32, u64) -> Result<()>) -> Found {
    let pod = Pod::new(name)?;
    let reader = match Part::start(reader, &[&pod.0]) {
        // Such as a node without user namespaces.
        Err(error) => return Ok((PointStatus::Unknown, format!("no reader starts: {error:#}"))),
        Ok(reader) => reader,
    };
    let count = || -> Result<_> {
        Ok((
            read_mount_table()?.entries().len(),
            reader.mounts()?.lines().count(),
        ))
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
    Ok((
        PointStatus::Ok,
        format!("{} updates, {reads} reads, none failed", UPDATES - 1),
    ))
}

/// A spec with the ids of a user namespace.
const OWN_USERS: &str = r#"{"linux":{"namespaces":[{"type":"user"}],
    "uidMappings":[{"containerID":0,"hostID":0,"size":1}],
    "gidMappings":[{"containerID":0,"hostID":0,"size":1}]}}"#;

/// Steps of the agent after an update: the host's subPath, then the container's mount.
pub(super) fn refresh(
    helper: &HelperProcess,
    pod: &Pod,
    init: u32,
    spec: Option<&str>,
) -> Result<()> {
    let volume = VolumeOfPod {
        kubelet_root: pod.0.join("kubelet"),
        pod_uid: "uid-1".to_owned(),
        volume: "conf".to_owned(),
    };
    let problems = rebind_volume(&volume, &policy()).problems;
    ensure!(
        problems.is_empty(),
        "re-bind the subPath: {}",
        problems.join("; ")
    );
    let refreshed = refresh_container(
        helper,
        &HeldProcess::open(init)?,
        Some(&SpecUsers::from_spec(spec.unwrap_or("{}").as_bytes())?),
        &[&PodVolumes::open(&volume.pod_directory())?],
        RefreshAct::Replace(Notify::None),
        &TuckRecords::at(&pod.0.join("tucks")),
    )?;
    let results: Vec<_> = refreshed
        .mounts
        .iter()
        .map(|mount| &mount.outcome)
        .collect();
    ensure!(
        refreshed.is_current(),
        "the mount was not replaced: {results:?}"
    );
    Ok(())
}

/// A refresh that is killed, each time a little later after its start, and a refresh that finishes
/// the work.
fn killed_refresh(helper: &HelperProcess, pod: &Pod, init: u32, version: u64) -> Result<()> {
    let mut killed = Part::start("refresh", &[&pod.0, init.to_string().as_ref()])?;
    killed.tell("x")?;
    sleep(KILL_STEP * u32::try_from(version)?);
    killed.child.kill()?;
    killed.child.wait()?;
    refresh(helper, pod, init, None).context("after a kill")?;
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
    let (place, kind) = (pod.shared().join("later"), Some("tmpfs"));
    let inside = " /host/later ";
    mount(kind, &place, kind, MsFlags::empty(), None::<&str>)?;
    ensure!(
        container.mounts()?.contains(inside),
        "a mount of the host does not arrive"
    );
    umount(&place)?;
    ensure!(
        !container.mounts()?.contains(inside),
        "an umount of the host does not arrive"
    );
    container.stop(1)?;
    Ok((
        PointStatus::Ok,
        "a mount and an umount of the host arrive".to_owned(),
    ))
}

/// A container of a real runtime with a stale subPath: repaired, created, compared, started.
fn container_of_runtime(program: &RootProgram, number: usize) -> Found {
    let version = program.output(&["--version"])?;
    let version = version.lines().next().unwrap_or_default();
    if !version.starts_with("crun") {
        // runc ignores the errors of read-only cgroups then.
        return create(program, version, "--rootless=true", number);
    }
    // crun refuses hybrid cgroups, also when it uses none.
    let (kind, none) = (Some("tmpfs"), None::<&str>);
    mount(kind, CGROUPS, kind, MsFlags::empty(), none).context("hide the cgroups")?;
    let found = create(program, version, "--cgroup-manager=disabled", number);
    umount(CGROUPS).context("show the cgroups")?;
    found
}

fn create(program: &RootProgram, version: &str, without_cgroup: &str, number: usize) -> Found {
    let pod = Pod::new(&format!("runtime-{number}"))?;
    fs::copy("/proc/self/exe", pod.root().join("bindguard"))?;
    pod.update(2)?;
    pod.admit()?;
    let at = |name: &str| pod.0.join(name);
    let call = |verb: &str, options: &[&Path]| -> Result<()> {
        let mut command = program.command();
        command.arg(without_cgroup).arg("--root").arg(at("state"));
        command.arg(verb).args(options).arg("selftest");
        // The container keeps the streams of its create.
        command.stdin(Stdio::null()).stdout(File::create(at(verb))?);
        command.stderr(File::create(at("errors"))?);
        let status = status_within(RUNTIME_TIMEOUT, command)?;
        let why = fs::read_to_string(at("errors")).unwrap_or_default();
        ensure!(
            status.success(),
            "{version} {verb}: {status}: {}",
            why.trim()
        );
        Ok(())
    };
    let (bundle, pid) = (at("bundle"), at("pid"));
    let options: [&Path; 4] = ["--bundle".as_ref(), &bundle, "--pid-file".as_ref(), &pid];
    if let Err(error) = call("create", &options) {
        return Ok((PointStatus::Unknown, format!("{error:#}")));
    }
    let pid: i32 = fs::read_to_string(&pid)?.trim().parse()?;
    let report = prove_container(&bundle, pid.unsigned_abs(), &policy(), &pod.places()).report;
    call("start", &[])?;
    // This process is the first of its pid namespace: it adopted the container.
    waitpid(Pid::from_raw(pid), None)?;
    call("delete", &["--force".as_ref()])?;
    let wrong = report.binds.first().and_then(|bind| bind.reason());
    if let Some(why) = wrong.or_else(|| report.problems.first().cloned()) {
        bail!("{version}: {why}");
    }
    ensure!(
        report.unproven == 0,
        "{version}: a bind could not be compared"
    );
    let shown = fs::read_to_string(at("create"))?;
    ensure!(
        shown == "2",
        "{version}: the container shows version {shown:?}, not 2"
    );
    Ok((
        PointStatus::Ok,
        format!("{version}: a stale subPath is repaired and shown"),
    ))
}
