//! Mounts whose device, ids or place differ from those of a plain bind are no false alarm of the
//! proof: idmapped binds, a user namespace, read-only overlays as of image volumes, `tmpcopyup`,
//! `/dev/shm`, and btrfs subvolumes.

use bindguard_integration::ctr::{Container, Ctr};
use bindguard_integration::journal;
use bindguard_integration::mount_calls::own_copy_at;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;

/// The record of the only container with this id.
fn record(id: &str) -> Result<Value> {
    let tasks = Path::new("/run/containerd/io.containerd.runtime.v2.task");
    let namespaces = tasks.read_dir().context("list the namespaces")?.flatten();
    let bundles = namespaces.map(|namespace| namespace.path().join(id));
    let record = bundles
        .map(|bundle| bundle.join("bindguard-binds.json"))
        .find(|record| record.exists());
    let record = record.with_context(|| format!("{id} has no record"))?;
    let json = fs::read(&record).with_context(|| format!("read {}", record.display()))?;
    serde_json::from_slice(&json).context("parse the record")
}

/// Starts the container, whose mount table has these words, and expects that the proof compared the
/// binds at these destinations and found no difference.
fn is_proven(
    ctr: &Ctr,
    id: &str,
    container: Container<'_>,
    words: &str,
    binds: &[&str],
) -> Result<()> {
    container.start()?.success()?;
    let table = format!("/proc/{}/mountinfo", ctr.pid(id)?);
    let table = fs::read_to_string(table).context("read the mount table")?;
    ensure!(table.contains(words), "no {words}: {table}");
    let record = record(id)?;
    let expected = record["binds"].as_array().context("a record has binds")?;
    for bind in binds {
        let is_expected = expected.iter().any(|it| it["destination"] == **bind);
        ensure!(is_expected, "{bind} is not in the record: {record}");
    }
    let lines = journal::lines(JOURNAL)?.into_iter();
    let lines: Vec<_> = lines
        .filter(|line| line["id"] == id && line["pid"].is_u64())
        .collect();
    ensure!(lines.is_empty(), "{lines:?}");
    ctr.remove(id)
}

/// Each of bindguard's two ways to a proof.
const RUNTIMES: [Runtime; 2] = [Runtime::Bindguard, Runtime::Wrapper];

#[test]
fn layers_and_filesystems_in_memory() {
    Setup::on(Generation::NEWEST).story(|node| {
        for folder in ["/run/image", "/run/layer", "/run/upper", "/run/shm"] {
            fs::create_dir(folder).with_context(|| format!("create {folder}"))?;
        }
        fs::write("/run/layer/file", "of the image").context("write a file")?;
        own_copy_at(
            "/run/layer".as_ref(),
            "/run/image".as_ref(),
            "/run/upper".as_ref(),
        )?;
        tmpfs("/run/shm", "mode=1777,size=65536k")?;
        let ctr = node.ctr();
        let copied = "type=tmpfs,src=tmpfs,dst=/etc,options=rw:tmpcopyup";
        for runtime in RUNTIMES {
            let id = format!("layers-{runtime:?}").to_lowercase();
            let container = ctr
                .container(&id)
                .runtime(runtime)
                .argument("--mount")
                .argument(copied)
                .mount(Bind::new("/run/image", "/image").options(&["rbind", "ro", "rprivate"]))
                .mount(Bind::new("/run/shm", "/dev/shm").options(&["rbind", "rw", "rprivate"]))
                .mount(Bind::new("/run/layer/file", "/etc/file").options(&["bind", "ro"]));
            is_proven(
                &ctr,
                &id,
                container,
                " / /etc rw",
                &["/image", "/dev/shm", "/etc/file"],
            )?;
        }
        unmount("/run/shm")?;
        unmount("/run/image")
    });
}

#[test]
fn other_ids() {
    Setup::on(Generation::NEWEST).story(|node| {
        fs::create_dir("/run/volume").context("create the volume")?;
        tmpfs("/run/volume", "mode=755")?;
        let ctr = node.ctr();
        for runtime in RUNTIMES {
            let id = format!("ids-{runtime:?}").to_lowercase();
            let container = ctr
                .container(&id)
                .runtime(runtime)
                .argument("--uidmap")
                .argument("0:100000:65536")
                .argument("--gidmap")
                .argument("0:100000:65536")
                .argument("--remap-labels")
                .mount(Bind::new("/run/volume", "/plain").options(&["rbind", "ro", "rprivate"]))
                .mount(Bind::new("/run/volume", "/mapped").options(&["bind", "idmap", "rprivate"]));
            is_proven(&ctr, &id, container, ",idmapped", &["/plain", "/mapped"])?;
        }
        unmount("/run/volume")
    });
}

/// statx(2) has a different device for each subvolume, the mount table has a single device for all.
#[test]
fn btrfs_subvolumes() {
    Setup::on(Generation::NEWEST).story(|node| {
        let filesystems = fs::read_to_string("/proc/filesystems").context("list filesystems")?;
        let has_programs = ["mkfs.btrfs", "btrfs"]
            .into_iter()
            .all(privilege::has_program);
        if !has_programs || !filesystems.lines().any(|line| line.ends_with("btrfs")) {
            privilege::skipped("no btrfs");
            return Ok(());
        }
        let image = "/run/btrfs.image";
        host(["truncate", "--size=128M", image])?;
        host(["mkfs.btrfs", "--quiet", image])?;
        fs::create_dir("/run/disk").context("create the mount point")?;
        host(["mount", "-o", "loop", image, "/run/disk"])?;
        host(["btrfs", "subvolume", "create", "/run/disk/sub"])?;
        fs::create_dir("/run/disk/sub/folder").context("create a folder")?;
        fs::create_dir("/run/sub").context("create the mount point of the subvolume")?;
        host(["mount", "-o", "loop,subvol=sub", image, "/run/sub"])?;
        let ctr = node.ctr();
        for runtime in RUNTIMES {
            let id = format!("btrfs-{runtime:?}").to_lowercase();
            let options = ["rbind", "ro", "rprivate"];
            let sources = [
                "/run/disk/sub",
                "/run/disk/sub/folder",
                "/run/sub",
                "/run/sub/folder",
            ];
            let places = ["/a", "/b", "/c", "/d"];
            let mut container = ctr.container(&id).runtime(runtime);
            for (source, place) in sources.into_iter().zip(places) {
                container = container.mount(Bind::new(source, place).options(&options));
            }
            is_proven(&ctr, &id, container, "/sub/folder /b ro", &places)?;
        }
        unmount("/run/sub")?;
        unmount("/run/disk")
    });
}
