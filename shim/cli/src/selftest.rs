//! `bindguard selftest`: whether this node's kernel and OCI runtimes do what bindguard relies on.
//!
//! The scenes run in a child with a pid namespace and a mount namespace of its own, on a tmpfs. The
//! kernel kills the child with its parent, and everything in both namespaces with the child: no
//! mount, process or file is left on the node, also if the self-test is killed.
//!
//! A pod of the scenes has a configMap with a single key, whose content is the number of its
//! version, and a subPath of that key. Updates follow the kubelet's `AtomicWriter`.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{PathBuf, absolute};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
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
use bindguard_operator::root_program::{RootProgram, output_within, status_within};
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
use crate::show::Output;

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
const SUBPATH: &str = "pods/u/volume-subpaths/conf/app/0";
const VOLUME: &str = "pods/u/volumes/kubernetes.io~configmap/conf";
/// The line of a process that is ready for its work.
const READY: &str = "ready\n";
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
    #[command(flatten)]
    output: Output,
    /// The part of a process that the self-test starts.
    #[arg(hide = true)]
    part: Vec<String>,
}

impl Selftest {
    pub fn run(self) -> Result<ExitCode> {
        if let [part, arguments @ ..] = &self.part[..] {
            if part == "scenes" {
                return doctor::print(&run_scenes(&self.runtime)?, self.output);
            }
            let line = run_part(part, arguments).unwrap_or_else(|error| format!("{error:#}"));
            // a scene that failed reads no more
            let _ = write!(io::stdout(), "{line}");
            return Ok(ExitCode::SUCCESS);
        }
        ensure!(is_root(), "run the self-test: this needs root");
        let mut command = Command::new("/proc/self/exe");
        command.arg("selftest").args(self.output.arguments());
        for runtime in &self.runtime {
            let path = absolute(runtime)?;
            fs::symlink_metadata(&path).with_context(|| format!("run {}", path.display()))?;
            command.arg("--runtime").arg(path);
        }
        command.arg("scenes");
        // The child is the first process of the pid namespace.
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)
            .context("create namespaces for the self-test")?;
        let status = status_within(TIMEOUT, command).context("run the scenes")?;
        let code = status.code();
        let code = code.with_context(|| format!("the scenes ended: {status}"))?;
        Ok(u8::try_from(code)?.into())
    }
}

/// The work of a process that a scene starts: a reader, on the host or in a container, or a refresh
/// that is killed.
fn run_part(part: &str, arguments: &[String]) -> Result<String> {
    let [pod, init @ ..] = arguments else {
        // The program of a container of a real runtime.
        return Ok(fs::read_to_string(PLACE)?);
    };
    let pod = Pod(pod.clone());
    if let [init] = init {
        let helper = HelperProcess::start().context("start the helper process")?;
        print!("{READY}");
        io::read_to_string(io::stdin())?;
        refresh(&helper, &pod, init.parse()?, "{}")?;
        return Ok(String::new());
    }
    if part == "host" {
        return read(&pod.at(SUBPATH));
    }
    enter_container(&pod, part == "own-users")?;
    let reads = read(PLACE)?;
    let is_writable = File::options().write(true).open(PLACE).is_ok();
    ensure!(!is_writable, "the read-only bind became writable");
    Ok(reads)
}

/// Enters a mount namespace as a runtime makes one, with a read-only bind of the pod's subPath.
fn enter_container(pod: &Pod, has_own_users: bool) -> Result<()> {
    if has_own_users {
        unshare(CloneFlags::CLONE_NEWUSER)?;
        // user_namespaces(7): a process may map its own ids.
        for (file, text) in [
            ("setgroups", "deny"),
            ("uid_map", "0 0 1"),
            ("gid_map", "0 0 1"),
        ] {
            fs::write(format!("/proc/self/{file}"), text)?;
        }
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount_change("/", Propagation::DOWNSTREAM | Propagation::REC)?;
    let root = pod.at("root");
    let place = pod.at("root") + PLACE;
    mount_bind(&root, &root)?;
    mount_bind(pod.at("shared"), pod.at("root/host"))?;
    mount_bind(pod.at(SUBPATH), &place)?;
    mount_remount(&place, MountFlags::BIND | MountFlags::RDONLY, "")?;
    mount_change(&place, Propagation::PRIVATE)?;
    chdir(&root)?;
    // The old root then lies over the new root: pivot_root(2).
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    Ok(chdir("/")?)
}

/// Reads the file until stdin has the number of the last version, and returns the number of reads.
/// Fails unless no read failed, none saw an older version again, and the last saw the last version.
fn read(file: &str) -> Result<String> {
    print!("{READY}");
    let input = thread::spawn(|| io::read_to_string(io::stdin()));
    let (mut reads, mut last) = (0, 0);
    loop {
        let is_last_read = input.is_finished();
        let text = fs::read_to_string(file).with_context(|| format!("after {reads} reads"))?;
        let version: u32 = text.parse().context("read a truncated file")?;
        ensure!(version >= last, "a read saw version {version} after {last}");
        last = version;
        reads += 1;
        if is_last_read {
            let expected = input.join().ok().context("read stdin")??;
            ensure!(
                text == expected,
                "the last read saw version {last}, not {expected}"
            );
            return Ok(reads.to_string());
        }
    }
}

/// Starts a process of a scene, and waits until it is ready.
fn start(part: &str, arguments: &[&str]) -> Result<Child> {
    let mut child = Command::new("/proc/self/exe")
        .args(["selftest", part])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let out = child.stdout.as_mut().context("no stdout")?;
    let mut line = String::new();
    out.take(READY.len() as u64).read_to_string(&mut line)?;
    if line != READY {
        out.read_to_string(&mut line)?;
        bail!(line);
    }
    Ok(child)
}

/// Stops a reader that has to see this version last; returns its number of reads.
fn stop(mut reader: Child, version: u32) -> Result<u32> {
    write!(reader.stdin.take().context("no stdin")?, "{version}")?;
    let line = String::from_utf8(reader.wait_with_output()?.stdout)?;
    line.parse().ok().with_context(|| line)
}

fn mounts_of(process: &Child) -> Result<String> {
    let file = format!("/proc/{}/mountinfo", process.id());
    Ok(fs::read_to_string(file)?)
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
    check
        .message
        .insert_str(0, concat!("bindguard ", env!("CARGO_PKG_VERSION"), ", "));
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
                Ok(Ok(format!("{mounts} mounts are read")))
            },
        ),
        updates(
            "re-bind",
            "stale subPaths are not repaired before a container starts",
            "host",
            |pod, _, _| pod.admit(),
        ),
        updates(
            "live-refresh",
            "live refresh is not available: restart pods to get an update",
            "container",
            |pod, init, _| refresh(&helper, pod, init, "{}"),
        ),
        updates(
            "live-refresh-in-user-namespace",
            "live refresh is not available for pods with hostUsers: false",
            "own-users",
            |pod, init, _| refresh(&helper, pod, init, OWN_USERS),
        ),
        updates(
            "killed-refresh",
            "an agent that is killed can leave a pod half refreshed: restart the pod then",
            "container",
            |pod, init, version| {
                // Each time a little later after its start.
                let mut killed = start("refresh", &[&pod.0, &init.to_string()])?;
                drop(killed.stdin.take());
                thread::sleep(KILL_STEP * version);
                killed.kill()?;
                killed.wait()?;
                refresh(&helper, pod, init, "{}").context("after a kill")?;
                let shown = fs::read_to_string(format!("/proc/{init}/root{PLACE}"))?;
                ensure!(
                    shown == version.to_string(),
                    "after a kill version {shown} is shown, not {version}"
                );
                Ok(())
            },
        ),
        point(
            "propagation",
            "binds of the host's root keep what the host unmounts",
            || {
                let pod = Pod::new("propagation")?;
                let container = start("container", &[&pod.0])?;
                let place = pod.at("shared/later");
                let arrives =
                    || -> Result<bool> { Ok(mounts_of(&container)?.contains(" /host/later ")) };
                mount("tmpfs", &place, "tmpfs", MountFlags::empty(), None)?;
                ensure!(arrives()?, "a mount of the host does not arrive");
                unmount(&place, UnmountFlags::empty())?;
                ensure!(!arrives()?, "an umount of the host does not arrive");
                stop(container, 1)?;
                Ok(Ok("a mount and an umount of the host arrive".to_owned()))
            },
        ),
    ];
    if programs.is_empty() {
        programs.push(Err(Error::msg(
            "no runc and no crun on PATH: name a runtime with --runtime FILE",
        )));
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

/// The result of a scene: an outer error is a failure, and an inner error prevented the scene.
type Found = Result<Result<String>>;

/// Runs a scene; `consequence` is what follows from a failure for the node.
fn point(name: &'static str, consequence: &str, scene: impl FnOnce() -> Found) -> Point {
    let start = Instant::now();
    let (status, text) = match scene() {
        Ok(Ok(text)) => (PointStatus::Ok, text),
        Ok(Err(why)) => (PointStatus::Unknown, format!("{why:#}")),
        Err(error) => (PointStatus::Failed, format!("{error:#}; {consequence}")),
    };
    let took = start.elapsed().as_millis();
    let message = format!("{text} ({took} ms)");
    let check = Check {
        status,
        ..Check::ok(message)
    };
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
            "root/dev",
            "root/proc",
            "pods/u/volume-subpaths/conf/app",
            VOLUME,
        ] {
            fs::create_dir_all(pod.at(folder))?;
        }
        let subpath = pod.at(SUBPATH);
        File::create(&subpath)?;
        File::create(pod.at("root") + PLACE)?;
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
        let at = |name: &str| format!("{}/{VOLUME}/{name}", self.0);
        let payload = |version| format!("..2026_01_01_00_00_00.{version}");
        let new = payload(version);
        fs::create_dir(at(&new))?;
        fs::write(at(&new) + "/key", version.to_string())?;
        symlink(new, at("..data_tmp"))?;
        fs::rename(at("..data_tmp"), at("..data"))?;
        if version > 1 {
            fs::remove_dir_all(at(&payload(version - 1)))?;
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

/// Updates a pod's file while a reader reads without a pause. `step` follows each update, with the
/// pod, the pid of the reader, and the version.
fn updates(
    name: &'static str,
    consequence: &str,
    reader: &str,
    step: impl Fn(&Pod, u32, u32) -> Result<()>,
) -> Point {
    point(name, consequence, || {
        let pod = Pod::new(name)?;
        let reader = match start(reader, &[&pod.0]) {
            // Such as a node without user namespaces.
            Err(error) => return Ok(Err(error.context("no reader starts"))),
            Ok(reader) => reader,
        };
        let count = || -> Result<_> {
            let of_reader = mounts_of(&reader)?.lines().count();
            Ok((read_mount_table()?.entries().len(), of_reader))
        };
        let before = count()?;
        for version in 2..=UPDATES {
            pod.update(version)?;
            step(&pod, reader.id(), version)?;
        }
        let after = count()?;
        ensure!(
            after == before,
            "mounts of the host and of the reader: {after:?}, were {before:?}"
        );
        let (updates, reads) = (UPDATES - 1, stop(reader, UPDATES)?);
        Ok(Ok(format!("{updates} updates, {reads} reads, none failed")))
    })
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
        &TuckRecords::default(),
    )?;
    ensure!(
        refreshed.is_current(),
        "the mount was not replaced: {:?}",
        refreshed.mounts
    );
    Ok(())
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
    let call = |verb: &str, options: &[&str]| {
        let mut command = program.command();
        command
            .args([without_cgroup, "--root", &pod.at("state"), verb])
            .args(options)
            .arg("selftest");
        output_within(RUNTIME_TIMEOUT, command).with_context(|| format!("{version} {verb}"))
    };
    let (bundle, pid) = (pod.at("bundle"), pod.at("pid"));
    if let Err(error) = call("create", &["--bundle", &bundle, "--pid-file", &pid]) {
        return Ok(Err(error));
    }
    let pid: i32 = fs::read_to_string(&pid)?.trim().parse()?;
    // The container keeps the streams of its create.
    let output = File::open(format!("/proc/{pid}/fd/1"))?;
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
    let shown = io::read_to_string(output)?;
    ensure!(
        shown.trim() == "2",
        "{version}: the container shows version {shown:?}, not 2"
    );
    Ok(Ok(format!(
        "{version}: a stale subPath is repaired and shown"
    )))
}
