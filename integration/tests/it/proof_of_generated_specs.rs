//! Generated specs, which runc and crun create for real: the proof has no false alarm where the
//! runtime is honest, and finds each lie about a bind that the container sees.
//!
//! A case is a list of entries, and either an event on the host between the admission and the
//! comparison, or a lie: the runtime gets another spec than the guard admitted. docs/mounts.md
//! names what the proof does not find. A failing case is shrunk. `BINDGUARD_SEED` repeats a run;
//! `BINDGUARD_SPECS_OUT` names a folder for the specs, which `make differential SPECS=` reads.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_guard::{Attempt, Proved, admit, prove_container};
use bindguard_integration::programs::{Generation, Matrix, Oci};
use bindguard_testing::live::change;
use bindguard_testing::{bind, rounds};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// The type of a bind's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Folder,
    /// A folder with another mount below.
    Tree,
    /// A folder over which two mounts are stacked.
    Stack,
    LinkToFolder,
    File,
    LinkToFile,
    Socket,
    Device,
}

const FOLDERS: [Kind; 4] = [Kind::Folder, Kind::Tree, Kind::Stack, Kind::LinkToFolder];
const FILES: [Kind; 4] = [Kind::File, Kind::LinkToFile, Kind::Socket, Kind::Device];

/// Destinations below each other, and through symlinks of the image: `/link` leads to `/real`,
/// `/var/run` to `/run`, `/chain` to `/link/deep`.
const PLACES: [&str; 11] = [
    "/a",
    "/a/b",
    "/a/b/c",
    "/real",
    "/link",
    "/link/b",
    "/run/b",
    "/var/run/b",
    "/chain/b",
    "/dev/shm",
    "/./new//deep/",
];

#[derive(Debug, Clone)]
enum Entry {
    Bind {
        kind: Kind,
        /// The number of the source among the sources of this kind.
        source: usize,
        place: &'static str,
        options: Vec<&'static str>,
    },
    Tmpfs {
        place: &'static str,
    },
}

/// A change on the host, after the admission, before or after the runtime's mounts.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    /// Another file or folder gets the name of the source; the source gets a new name.
    Rotated,
    /// The folder of all sources gets a new name.
    MovedAbove,
    MountedOver,
    /// The topmost mount of a stack, or the mount in a tree.
    Unmounted,
    /// The same mount, of the second source, is moved to another place: `mount --move`.
    MovedMount,
    /// A program below the guard rewrites the spec honestly, as nvidia-container-runtime does: the
    /// admitted binds stay in their order, another is added among them.
    Rewritten,
}

/// A difference between the runtime's mounts and the spec, for a bind that the container sees.
#[derive(Debug, Clone, Copy)]
enum Lie {
    LeftOut,
    OtherSource,
    /// A folder in the source.
    SourceBelow,
    OtherPlace,
    LostFlags,
    Shared,
    StackedOver,
    CoveredAbove,
}

const LIES: [Lie; 8] = [
    Lie::LeftOut,
    Lie::OtherSource,
    Lie::SourceBelow,
    Lie::OtherPlace,
    Lie::LostFlags,
    Lie::Shared,
    Lie::StackedOver,
    Lie::CoveredAbove,
];

#[derive(Debug, Clone)]
struct Case {
    entries: Vec<Entry>,
    masked: Vec<&'static str>,
    read_only: Vec<&'static str>,
    event: (Event, bool),
    lie: Option<Lie>,
    /// Chooses the entry of the event or the lie.
    target: usize,
    is_crun: bool,
    /// The container has a user namespace of its own, in which the host's mounts are locked.
    has_users: bool,
}

fn entries() -> impl Strategy<Value = Entry> {
    let flags =
        proptest::collection::vec(select(vec!["ro", "rro", "nosuid", "nodev", "noexec"]), 0..3);
    let propagation = select(vec![
        "",
        "private",
        "rprivate",
        "slave",
        "rslave",
        "shared",
        "rshared",
        "unbindable",
        "runbindable",
    ]);
    let kinds = prop_oneof![2 => select(FOLDERS.to_vec()), 1 => select(FILES.to_vec())];
    let bind = (
        kinds,
        0..2usize,
        select(PLACES.to_vec()),
        select(vec!["bind", "rbind"]),
        flags,
        propagation,
    );
    let bind = bind.prop_map(|(kind, source, place, word, flags, propagation)| {
        let mut options = vec![word];
        options.extend(flags);
        if !propagation.is_empty() {
            options.push(propagation);
        }
        Entry::Bind {
            kind,
            source,
            place,
            options,
        }
    });
    let tmpfs = select(PLACES.to_vec()).prop_map(|place| Entry::Tmpfs { place });
    prop_oneof![6 => bind, 1 => tmpfs]
}

fn cases(is_lie: bool) -> impl Strategy<Value = Case> {
    let event = select(vec![
        Event::Nothing,
        Event::Rotated,
        Event::MovedAbove,
        Event::MountedOver,
        Event::Unmounted,
        Event::MovedMount,
        Event::Rewritten,
    ]);
    let some_places = |most| proptest::collection::vec(select(PLACES.to_vec()), 0..most);
    (
        proptest::collection::vec(entries(), 1..7),
        some_places(2),
        some_places(2),
        (event, any::<bool>()),
        select(LIES.to_vec()),
        0..100usize,
        any::<bool>(),
        prop_oneof![2 => Just(false), 1 => Just(true)],
    )
        .prop_map(
            move |(entries, masked, read_only, event, lie, target, is_crun, has_users)| Case {
                entries,
                masked,
                read_only,
                event: if is_lie {
                    (Event::Nothing, false)
                } else {
                    event
                },
                lie: is_lie.then_some(lie),
                target,
                is_crun,
                has_users,
            },
        )
}

impl Entry {
    /// A file is bound on a file below the place, at which nothing else is mounted.
    fn destination(&self) -> String {
        match self {
            Self::Bind { kind, place, .. } if FILES.contains(kind) => format!("{place}/file"),
            Self::Bind { place, .. } | Self::Tmpfs { place } => (*place).to_owned(),
        }
    }

    fn spec(&self, host: &Path) -> Value {
        let destination = self.destination();
        match self {
            Self::Bind {
                kind,
                source,
                options,
                ..
            } => json!({
                "type": "bind", "destination": destination, "options": options,
                "source": host.join(format!("{kind:?}-{source}")),
            }),
            Self::Tmpfs { .. } => {
                json!({"type": "tmpfs", "destination": destination, "source": "tmpfs", "options": ["mode=755"]})
            }
        }
    }

    /// The place in the container, without the image's symlinks.
    fn resolved(&self) -> PathBuf {
        let mut place: PathBuf = Path::new(&self.destination()).components().collect();
        for (link, target) in [
            ("/chain", "/link/deep"),
            ("/link", "/real"),
            ("/var/run", "/run"),
        ] {
            if let Ok(rest) = place.strip_prefix(link) {
                place = Path::new(target).join(rest);
                place = place.components().collect();
            }
        }
        place
    }
}

impl Case {
    /// Four faults that the proof is right to report. A runtime binds a read-only path over itself
    /// with the mounts below, but not with an unbindable mount, which is lost. The copies become shared
    /// if the copy of a shared mount is around them. Under crun 1.28 they lose `ro` and `nosuid`. A
    /// symlink that leads elsewhere before the runtime's mount: its writer chose the source.
    fn without_known_faults(mut self) -> Self {
        let (entries, is_crun) = (&self.entries, self.is_crun);
        self.read_only.retain(|path| {
            let path = Entry::Tmpfs { place: path }.resolved();
            let mut below = entries.iter().filter(|it| it.resolved().starts_with(&path));
            !below.any(|entry| match entry {
                Entry::Bind { options, .. } => {
                    is_crun
                        || ["unbindable", "runbindable", "shared", "rshared"]
                            .iter()
                            .any(|it| options.contains(it))
                }
                Entry::Tmpfs { .. } => false,
            })
        });
        if let (Event::Rotated, is_before) = &mut self.event
            && let Entry::Bind { kind, .. } = &self.entries[self.target % self.entries.len()]
            && matches!(kind, Kind::LinkToFolder | Kind::LinkToFile)
        {
            *is_before = false;
        }
        self
    }

    /// The positions of the binds that the container sees.
    fn visible(&self) -> Vec<usize> {
        let mut visible = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            let place = entry.resolved();
            let is_covered = |it: &Entry| place.starts_with(it.resolved());
            let masked = self.masked.iter().map(|place| Entry::Tmpfs { place });
            let is_bind = matches!(entry, Entry::Bind { .. });
            let mut later = self.entries[index + 1..].iter();
            if is_bind && !later.any(is_covered) && !masked.into_iter().any(|it| is_covered(&it)) {
                visible.push(index);
            }
        }
        visible
    }

    /// The mounts that the runtime makes, in place of the admitted mounts. `None` if this lie does
    /// not apply to the bind.
    fn lied(&self, lie: Lie, target: usize, admitted: &[Value]) -> Option<Vec<Value>> {
        let Entry::Bind { kind, options, .. } = &self.entries[target] else {
            return None;
        };
        let mut mounts = admitted.to_vec();
        let of_target = &mut mounts[target];
        match lie {
            Lie::LeftOut => drop(mounts.remove(target)),
            Lie::OtherSource => {
                let source = of_target["source"].as_str()?.to_owned();
                let folder = Path::new(&source).parent()?;
                let name = if FILES.contains(kind) {
                    "other-file"
                } else {
                    "other-folder"
                };
                of_target["source"] = json!(folder.join(name));
            }
            Lie::SourceBelow if FILES.contains(kind) => return None,
            Lie::SourceBelow => {
                let source = of_target["source"].as_str()?.to_owned();
                of_target["source"] = json!(Path::new(&source).join("b"));
            }
            Lie::OtherPlace => of_target["destination"] = "/elsewhere".into(),
            Lie::LostFlags => {
                let flags = ["ro", "rro", "nosuid", "nodev", "noexec"];
                let left: Vec<_> = options.iter().filter(|it| !flags.contains(it)).collect();
                if left.len() == options.len() {
                    return None;
                }
                of_target["options"] = json!(left);
            }
            Lie::Shared => {
                let words = [
                    "private",
                    "rprivate",
                    "slave",
                    "rslave",
                    "unbindable",
                    "runbindable",
                ];
                let mut left: Vec<_> = options.clone();
                left.retain(|it| !words.contains(it));
                if left.len() == options.len() {
                    return None;
                }
                left.push("shared");
                of_target["options"] = json!(left);
            }
            Lie::StackedOver if FILES.contains(kind) => return None,
            Lie::StackedOver => {
                let place = of_target["destination"].clone();
                mounts.push(json!({"type": "tmpfs", "destination": place, "source": "tmpfs"}));
            }
            Lie::CoveredAbove => {
                let place = self.entries[target].resolved();
                let above = place.parent().filter(|above| above.parent().is_some())?;
                mounts.push(json!({"type": "tmpfs", "destination": above, "source": "tmpfs"}));
            }
        }
        Some(mounts)
    }
}

/// The host's files of a case, and its bundle. Ends all of it when dropped.
struct Scene<'n> {
    node: &'n Node,
    folder: PathBuf,
    runtime: PathBuf,
    id: String,
}

impl<'n> Scene<'n> {
    fn new(node: &'n Node, runtime: &Path, number: u32) -> Self {
        let scene = Self {
            node,
            folder: node.disk().join(format!("case-{number}")),
            runtime: runtime.to_owned(),
            id: format!("case-{number}"),
        };
        let host = scene.host();
        for number in 0..2 {
            for kind in FOLDERS.iter().chain(&FILES) {
                let path = host.join(format!("{kind:?}-{number}"));
                scene.make_source(*kind, &path, &number.to_string());
            }
        }
        fill(&host.join("other-folder"));
        fs::write(host.join("other-file"), "").unwrap();
        let image = scene.folder.join("rootfs");
        for folder in ["real/deep", "run", "var", "bin", "proc", "dev"] {
            fs::create_dir_all(image.join(folder)).unwrap();
        }
        for (target, link) in [
            ("real", "link"),
            ("/run", "var/run"),
            ("link/deep", "chain"),
        ] {
            symlink(target, image.join(link)).unwrap();
        }
        let program = image.join("bin/program");
        fs::write(&program, "#!/bin/program\n").unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        scene
    }

    fn host(&self) -> PathBuf {
        self.folder.join("host")
    }

    fn make_source(&self, kind: Kind, path: &Path, name: &str) {
        let host = self.host();
        match kind {
            Kind::Folder => fill(path),
            // The kernel moves no mount out of a shared mount: the second tree is a private mount,
            // and of the second stack the lower mount is private.
            Kind::Tree => {
                fill(path);
                if name == "1" {
                    mount_tmpfs(path);
                    change(path, MsFlags::MS_PRIVATE);
                    fill(path);
                }
                mount_tmpfs(&path.join("b"));
                fill(&path.join("b"));
            }
            Kind::Stack => {
                fill(path);
                mount_tmpfs(path);
                fill(path);
                if name == "1" {
                    change(path, MsFlags::MS_PRIVATE);
                }
                mount_tmpfs(path);
                fill(path);
            }
            Kind::LinkToFolder => {
                fill(&host.join(format!("target-{name}")));
                symlink(format!("target-{name}"), path).unwrap();
            }
            Kind::File => fs::write(path, "").unwrap(),
            Kind::LinkToFile => {
                fs::write(host.join(format!("file-{name}")), "").unwrap();
                symlink(host.join(format!("file-{name}")), path).unwrap();
            }
            Kind::Socket => drop(UnixListener::bind(path).unwrap()),
            Kind::Device => {
                mknod(path, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(1, 3)).unwrap();
            }
        }
    }

    fn write_spec(&self, case: &Case, mounts: &[Value]) {
        let mut all = mounts.to_vec();
        all.push(json!({"type": "proc", "destination": "/proc", "source": "proc"}));
        let mut namespaces = vec!["mount", "pid", "ipc", "uts"];
        let mut ids = json!([]);
        if case.has_users {
            namespaces.push("user");
            ids = json!([{"containerID": 0, "hostID": 0, "size": 65536}]);
        }
        let namespaces: Vec<_> = namespaces
            .iter()
            .map(|kind| json!({ "type": kind }))
            .collect();
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {"args": ["/bin/program"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
            "root": {"path": self.folder.join("rootfs")},
            "mounts": all,
            "linux": {
                "namespaces": namespaces,
                "uidMappings": ids,
                "gidMappings": ids,
                "cgroupsPath": self.node.cgroups_path(&self.id),
                "maskedPaths": case.masked,
                "readonlyPaths": case.read_only,
            },
        });
        fs::write(self.folder.join("config.json"), spec.to_string()).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = self.node.command(&self.runtime).unwrap();
        command.arg("--root").arg(self.folder.join("state"));
        command.args(arguments).output().unwrap()
    }

    /// Creates the container. `None` if the runtime refuses the spec.
    fn create(&self) -> Option<u32> {
        let bundle = self.folder.to_str().unwrap();
        let pid_file = self.folder.join("pid");
        let pid = pid_file.to_str().unwrap();
        let mut command = self.node.command(&self.runtime).unwrap();
        command.arg("--root").arg(self.folder.join("state"));
        command.args(["create", "--bundle", bundle, "--pid-file", pid, &self.id]);
        // The init keeps the streams: a pipe would never end.
        let log = fs::File::create(self.folder.join("log")).unwrap();
        command.stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let created = command.status().unwrap();
        let pid = fs::read_to_string(pid_file).ok()?;
        created.success().then(|| pid.trim().parse().unwrap())
    }

    fn cause(&self, event: Event, case: &Case) {
        let Some(Entry::Bind { kind, source, .. }) =
            case.entries.get(case.target % case.entries.len())
        else {
            return;
        };
        let path = self.host().join(format!("{kind:?}-{source}"));
        // The mount that a tree has below, or the topmost mount of a stack.
        let of_mount = match kind {
            Kind::Tree => Some(path.join("b")),
            Kind::Stack => Some(path.clone()),
            _ => None,
        };
        match event {
            Event::Nothing | Event::Rewritten => {}
            Event::Rotated if of_mount.is_some() => {}
            Event::Rotated => {
                fs::rename(&path, path.with_extension("1")).unwrap();
                self.make_source(*kind, &path, "new");
            }
            Event::MovedAbove => {
                fs::rename(self.host(), self.folder.join("moved")).unwrap();
            }
            Event::MountedOver if FOLDERS.contains(kind) => {
                mount_tmpfs(&path);
                fill(&path);
            }
            Event::MountedOver => bind(&self.host().join("other-file"), &path),
            Event::Unmounted => {
                if let Some(place) = of_mount {
                    umount2(&place, MntFlags::MNT_DETACH).unwrap();
                }
            }
            Event::MovedMount => {
                if let Some(place) = of_mount.filter(|_| *source == 1) {
                    let (to, none) = (self.host().join("other-folder"), None::<&str>);
                    mount(Some(&place), &to, none, MsFlags::MS_MOVE, none).unwrap();
                }
            }
        }
    }

    fn policy() -> Policy {
        Policy {
            proof: Alarm::Refuse,
            ..Policy::default()
        }
    }

    /// False if the spec has no bind to compare.
    fn admit(&self) -> bool {
        let admission = admit(
            &self.folder,
            &Self::policy(),
            &Places::default(),
            Attempt::First,
        );
        assert!(admission.refusal.is_none(), "{admission:?}");
        admission.is_provable
    }

    fn prove(&self, pid: u32) -> Proved {
        prove_container(&self.folder, pid, &Self::policy(), &Places::default())
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        self.run(&["delete", "--force", &self.id]);
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
        let folder = self.folder.to_string_lossy();
        for line in table.lines().rev() {
            if let Some(place) = line.split(' ').nth(4).filter(|it| it.starts_with(&*folder)) {
                // The next line may be the same mount's copy.
                let _ = umount2(place, MntFlags::MNT_DETACH);
            }
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn fill(folder: &Path) {
    for below in ["b/c", "deep/b"] {
        fs::create_dir_all(folder.join(below)).unwrap();
    }
    for file in ["file", "b/file", "b/c/file", "deep/b/file"] {
        fs::write(folder.join(file), "").unwrap();
    }
}

fn mount_tmpfs(place: &Path) {
    let tmpfs = Some("tmpfs");
    mount(tmpfs, place, tmpfs, MsFlags::empty(), Some("mode=755")).unwrap();
}

/// Runs a case. `Ok(false)` if the runtime refuses the spec, or the lie changes nothing that the
/// container sees.
fn run_case(
    node: &Node,
    programs: &[PathBuf; 2],
    case: &Case,
    number: u32,
) -> Result<bool, String> {
    let scene = Scene::new(node, &programs[usize::from(case.is_crun)], number);
    let mounts: Vec<_> = case
        .entries
        .iter()
        .map(|it| it.spec(&scene.host()))
        .collect();
    let mut lied = None;
    if let Some(lie) = case.lie {
        let visible = case.visible();
        if visible.is_empty() {
            return Ok(false);
        }
        let target = visible[case.target % visible.len()];
        lied = Some(case.lied(lie, target, &mounts));
        if matches!(lied, Some(None)) {
            return Ok(false);
        }
    }
    scene.write_spec(case, &mounts);
    if let Some(folder) = std::env::var_os("BINDGUARD_SPECS_OUT") {
        let spec = Path::new(&folder).join(format!("{}-{number}.json", case.lie.is_some()));
        fs::copy(scene.folder.join("config.json"), spec).map_err(|error| error.to_string())?;
    }
    if !scene.admit() {
        return Ok(false);
    }
    let (event, is_before) = case.event;
    if is_before {
        scene.cause(event, case);
    }
    if let Some(Some(mounts)) = &lied {
        scene.write_spec(case, mounts);
    } else if matches!(event, Event::Rewritten) {
        let source = scene.host().join("other-folder");
        let added = json!({"type": "bind", "destination": "/added", "source": source, "options": ["rbind", "ro"]});
        let mut rewritten = mounts.clone();
        rewritten.insert(case.target % (mounts.len() + 1), added);
        scene.write_spec(case, &rewritten);
    }
    let Some(pid) = scene.create() else {
        return Ok(false);
    };
    if !is_before {
        scene.cause(event, case);
    }
    let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    // crun ignores `shared` below a private root.
    if matches!(case.lie, Some(Lie::Shared)) && !table.contains(" shared:") {
        return Ok(false);
    }
    let proved = scene.prove(pid);
    let is_right = proved.refusal.is_some() == lied.is_some();
    if is_right {
        return Ok(true);
    }
    Err(format!("{case:#?}\n{proved:#?}\n{table}"))
}

/// Runs `count` cases, and at least half of them with effect.
fn run_cases(is_lie: bool, count: u32) {
    let seed = std::env::var("BINDGUARD_SEED").ok();
    let seed: u64 = seed
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(rounds(1, 0));
    let seed = if seed == 0 {
        u64::from(std::process::id())
    } else {
        seed
    };
    Setup::on(Generation::NEWEST).story(|node| {
        let matrix = Matrix::locate()?;
        let newest = Generation::NEWEST;
        let programs = [matrix.oci(Oci::Runc(newest)), matrix.oci(Oci::Crun(newest))];
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config {
            cases: count,
            max_shrink_iters: 300,
            failure_persistence: None,
            ..Config::default()
        };
        let (number, effective) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let result = TestRunner::new_with_rng(config, rng).run(&cases(is_lie), |case| {
            number.set(number.get() + 1);
            let case = case.without_known_faults();
            match run_case(node, &programs, &case, number.get()) {
                Ok(has_effect) => effective.set(effective.get() + u32::from(has_effect)),
                Err(why) => return Err(TestCaseError::fail(why)),
            }
            Ok(())
        });
        println!(
            "seed {seed}: {} cases, {} with effect",
            number.get(),
            effective.get()
        );
        anyhow::ensure!(result.is_ok(), "seed {seed}: {}", result.unwrap_err());
        anyhow::ensure!(
            effective.get() * 3 > count,
            "only {} with effect",
            effective.get()
        );
        Ok(())
    });
}

#[test]
fn an_honest_runtime_causes_no_alarm() {
    run_cases(false, rounds(150, 10_000));
}

#[test]
fn each_lie_about_a_visible_bind_is_found() {
    run_cases(true, rounds(150, 10_000));
}
