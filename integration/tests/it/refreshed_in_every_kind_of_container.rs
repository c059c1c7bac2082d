//! An update reaches every kind of container of a pod: with a read-only root, without `/proc`,
//! frozen, in its own user namespace, and with an idmapped mount. The attributes of the mounts are
//! unchanged.
//!
//! The containers are those of `ctr`, with the annotations of a pod: CRI clients cannot make all of
//! them on every containerd.

use bindguard_integration::mounts;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;

const UID: &str = "uid-1";
const FILE: &str = "/etc/app.conf";
const FOLDER: &str = "/etc/folder";

struct Kind {
    name: &'static str,
    /// Arguments of `ctr run`.
    arguments: &'static [&'static str],
    /// Options of its binds.
    options: &'static [&'static str],
    program: &'static str,
}

const PLAIN: Kind = Kind {
    name: "plain",
    arguments: &[],
    options: &["rbind", "rprivate", "ro"],
    program: "exec sleep 1000000",
};
const READ_ONLY: Kind = Kind {
    name: "read-only",
    arguments: &["--read-only"],
    ..PLAIN
};
const NO_PROC: Kind = Kind {
    name: "no-proc",
    arguments: &["--cap-add", "CAP_SYS_ADMIN"],
    program: "umount -l /proc && exec sleep 1000000",
    ..PLAIN
};
const FROZEN: Kind = Kind {
    name: "frozen",
    ..PLAIN
};
const USERNS: Kind = Kind {
    name: "userns",
    arguments: &["--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"],
    ..PLAIN
};

/// The binds themselves are idmapped, as the volumes of a pod with `hostUsers: false` are.
const IDMAPPED: Kind = Kind {
    name: "idmapped",
    options: &["rbind", "rprivate", "ro", "idmap"],
    ..USERNS
};

fn with_runc(generation: Generation) {
    // runc 1.2, which came with containerd 2.0, is the first runc with idmapped mounts.
    let idmaps = generation >= Generation::V2_1;
    Setup::on(generation).story(|node| story(node, idmaps));
}

fn with_crun(generation: Generation) {
    Setup::on(generation)
        .oci(Oci::Crun(generation))
        .story(|node| story(node, true));
}

#[test]
fn runc_1_4() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Runc(Generation::V2_3))
        .story(|node| story(node, true));
}

mod runc {
    use super::*;
    on_newest_and_older!(with_runc);
}

mod crun {
    use super::*;
    on_newest_and_older!(with_crun);
}

fn story(node: &Node, idmaps: bool) -> Result<()> {
    let pod = node.kubelet().pod(UID)?;
    let payload = |text| [("app.conf", text), ("folder/key", text)];
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &payload("one"))?;
    let ctr = node.ctr();
    let kinds = [PLAIN, READ_ONLY, NO_PROC, FROZEN, USERNS]
        .into_iter()
        .chain(idmaps.then_some(IDMAPPED));
    let started: Vec<_> = kinds
        .map(|kind| Started::start(node, &volume, kind))
        .collect::<Result<_>>()?;
    let frozen = id_of(node, FROZEN.name);
    run(ctr.command(&["task", "pause", &frozen]))?.success()?;
    ctr.wait_for_status(&frozen, "PAUSED")?;
    for text in ["two", "three"] {
        volume.update(&payload(text))?;
        let done = node.bindguard(["refresh", "--pod", "default/web"])?;
        ensure!(done.code() == 0, "{done:?}");
        for container in &started {
            container
                .reads(text)
                .with_context(|| format!("after {done:?}"))?;
        }
    }
    run(ctr.command(&["task", "resume", &frozen]))?.success()?;
    for container in started {
        ctr.remove(&container.id)?;
    }
    delete_pod(node, UID)
}

/// A driver mounts its volume anew, with a mount in it. All containers get both mounts and the
/// host's later mounts, also containers that only propagation reaches.
#[test]
fn a_volume_with_a_mount_in_it() {
    Setup::on(Generation::NEWEST).story(|node| {
        let (pod, ctr) = (node.kubelet().pod(UID)?, node.ctr());
        let volume = pod.path().join("volumes/kubernetes.io~csi/pv/mount");
        let nested = volume.join("nested");
        fs::create_dir_all(&volume)?;
        let publish = |text: &str| -> Result<()> {
            tmpfs(&volume, "")?;
            fs::create_dir(&nested)?;
            tmpfs(&nested, "")?;
            Ok(fs::write(nested.join("file"), text)?)
        };
        publish("one")?;
        let mut started = Vec::new();
        for kind in [PLAIN, USERNS, IDMAPPED] {
            let id = id_of(node, kind.name);
            let idmap = kind.options.contains(&"idmap").then_some("idmap");
            let options: Vec<_> = ["rbind", "rslave"].into_iter().chain(idmap).collect();
            let mut container = ctr.container(&id).in_pod(kind.name, "web", UID);
            for argument in kind.arguments {
                container = container.argument(argument);
            }
            let container = container.mount(Bind::new(&volume, "/data").options(&options));
            container.runs(&["sleep", "1000000"]).start()?.success()?;
            started.push((
                id.clone(),
                PathBuf::from(format!("/proc/{}", ctr.pid(&id)?)),
            ));
        }
        // The lines of the volume's mounts in a container.
        let lines = |process: &Path| -> Result<Vec<String>> {
            let table = fs::read_to_string(process.join("mountinfo"))?;
            let lines = table.lines().filter(|line| line.contains(" /data"));
            Ok(lines.map(str::to_owned).collect())
        };
        for text in ["two", "three"] {
            host(["umount".as_ref(), "--lazy".as_ref(), volume.as_os_str()])?;
            publish(text)?;
            let before = mounts::table()?;
            let done = node.bindguard(["refresh", "--pod", "default/web", "--what", "volumes"])?;
            ensure!(done.code() == 0, "{done:?}");
            ensure!(mounts::table()? == before, "the host's mounts have changed");
            for (id, process) in &started {
                let read = fs::read_to_string(process.join("root/data/nested/file"))?;
                ensure!(read == text, "{id} reads {read:?}, after {done:?}");
                let lines = lines(process)?;
                let is_slave =
                    |line: &String| line.contains(" master:") && !line.contains(" shared:");
                ensure!(
                    lines.len() == 2 && lines.iter().all(is_slave),
                    "{id}: {lines:#?}"
                );
            }
        }
        unmount(&nested)?;
        for (id, process) in &started {
            let lines = lines(process)?;
            ensure!(lines.len() == 1, "{id}: {lines:#?}");
            ctr.remove(id)?;
        }
        delete_pod(node, UID)
    });
}

/// The id is unique on this machine, because the test finds a process by its cgroup's name.
fn id_of(node: &Node, name: &str) -> String {
    format!("{}-{name}", node.name())
}

/// A running container, and its mounts after its start.
struct Started {
    name: &'static str,
    id: String,
    process: PathBuf,
    mounts: Vec<String>,
}

impl Started {
    fn start(
        node: &Node,
        volume: &Volume,
        Kind {
            name,
            arguments,
            options,
            program,
        }: Kind,
    ) -> Result<Self> {
        let (ctr, id) = (node.ctr(), id_of(node, name));
        let bind = |index, key, place| -> Result<Bind> {
            Ok(Bind::new(volume.subpath(name, index, key).bind()?, place).options(options))
        };
        let container = ctr
            .container(&id)
            .mount(bind(0, "app.conf", FILE)?)
            .mount(bind(1, "folder", FOLDER)?);
        let container = container
            .in_pod(name, "web", UID)
            .runs(&["sh", "-c", program]);
        let container = arguments.iter().fold(container, |container, argument| {
            container.argument(argument)
        });
        container
            .start()?
            .success()
            .with_context(|| format!("start {name}"))?;
        let process = PathBuf::from(format!("/proc/{}", ctr.pid(&id)?));
        let mut started = Self {
            name,
            id,
            process,
            mounts: Vec::new(),
        };
        until(&format!("{name} is what it should be"), || {
            started.mounts = started.mounts()?;
            started.is_of_its_kind()
        })?;
        Ok(started)
    }

    fn is_of_its_kind(&self) -> Result<bool> {
        let has = |place: &str, option: &str| {
            let of_place = self
                .mounts
                .iter()
                .filter_map(|mount| mount.strip_prefix(place)?.strip_prefix(' '));
            of_place
                .flat_map(|options| options.split([',', ' ']))
                .any(|it| it == option)
        };
        let uid_map =
            fs::read_to_string(self.process.join("uid_map")).context("read its uid_map")?;
        let is_mapped = uid_map.split_whitespace().eq(["0", "100000", "65536"]);
        let has_proc = has("/proc", "rw");
        Ok(match self.name {
            "no-proc" => !has_proc,
            "read-only" => has("/", "ro"),
            "userns" => is_mapped && !has(FILE, "idmapped"),
            "idmapped" => is_mapped && has(FILE, "idmapped") && has(FOLDER, "idmapped"),
            _ => !is_mapped && !has("/", "ro") && has_proc,
        })
    }

    /// From outside: without `/proc`, or frozen, it can run no program.
    fn reads(&self, text: &str) -> Result<()> {
        for place in [FILE.to_owned(), format!("{FOLDER}/key")] {
            let path = self.process.join("root").join(&place[1..]);
            let read = fs::read_to_string(&path)
                .with_context(|| format!("read {place} in {}", self.name))?;
            ensure!(
                read == text,
                "{} reads {read:?} in {place}, not {text:?}",
                self.name
            );
        }
        let (before, now) = (&self.mounts, self.mounts()?);
        ensure!(
            now == *before,
            "the mounts of {} changed:\n{before:#?}\n{now:#?}",
            self.name
        );
        Ok(())
    }

    /// The container's mount points with options and propagation.
    fn mounts(&self) -> Result<Vec<String>> {
        let table =
            fs::read_to_string(self.process.join("mountinfo")).context("read its mounts")?;
        let mount = |line: &str| {
            line.split(" - ")
                .next()?
                .splitn(5, ' ')
                .nth(4)
                .map(str::to_owned)
        };
        let mut mounts: Vec<String> = table.lines().filter_map(mount).collect();
        mounts.sort();
        Ok(mounts)
    }
}
