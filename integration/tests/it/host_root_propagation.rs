//! A container with a part of the host mounted must not keep the host's mounts alive
//! (containerd#3667).
//!
//! With whatever propagation it requests, an unmount on the host reaches it, with runc and with
//! crun; a bind that requested rshared stays shared. The container shows no mount that the runtime
//! alone would not have made at its create. On a host whose `/` is private nothing can
//! reach it: bindguard says so, and the container starts.

use bindguard_integration::prelude::*;
use std::collections::BTreeSet;
use std::fs::File;

use bindguard_integration::image;
use bindguard_integration::node::HostRoot;
use bindguard_integration::{mounts, on_every_generation};

const PROPAGATIONS: [Option<&str>; 5] = [
    Some("rprivate"),
    None,
    Some("private"),
    Some("slave"),
    Some("rshared"),
];

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            umount_reaches_the_container(node, runtime, Path::new("/"), Some("rprivate"))?;
        }
        Ok(())
    });
}

on_every_generation!(story);

#[test]
fn runc() {
    every_source_and_option(Oci::Runc(Generation::NEWEST));
}

#[test]
fn runc_1_4() {
    every_source_and_option(Oci::Runc(Generation::V2_3));
}

#[test]
fn crun() {
    every_source_and_option(Oci::Crun(Generation::NEWEST));
}

fn every_source_and_option(oci: Oci) {
    Setup::on(Generation::NEWEST).oci(oci).story(|node| {
        let kubelet = node.kubelet().root();
        for source in [
            Path::new("/"),
            Path::new("/run"),
            Path::new("/var"),
            kubelet,
        ] {
            for propagation in PROPAGATIONS {
                umount_reaches_the_container(node, Runtime::Bindguard, source, propagation)
                    .with_context(|| format!("{} with {propagation:?}", source.display()))?;
            }
        }
        Ok(())
    });
}

#[test]
fn private_host_root_is_reported() {
    Setup::on(Generation::V1_7)
        .host_root(HostRoot::Private)
        .story(|node| {
            let bind = Bind::new("/", "/host").options(&["rbind", "rprivate"]);
            node.ctr()
                .container("monitor")
                .mount(bind)
                .start()?
                .success()?;
            node.ctr().remove("monitor")?;
            let ours = |line: &str| {
                line.contains("bindguard: bind of / at /host") && line.contains("private")
            };
            let helps = |line: &str| {
                line.contains("level=warn")
                    && line.contains("run on the host: mount --make-rshared /")
            };
            node.wait_for_log("what to run about a private host root", |line| {
                ours(line) && helps(line)
            })
        });
}

/// rslave in a spec is a request: after the create, the container's own mount is checked.
#[test]
fn a_bind_that_is_still_no_slave_is_recorded() {
    Setup::on(Generation::NEWEST)
        .host_root(HostRoot::Private)
        .story(|node| {
            let ctr = node.ctr();
            ctr.container("monitor")
                .mount(Bind::new("/", "/host").options(&["rbind", "rslave"]))
                .start()?
                .success()?;
            let pid = ctr.pid("monitor")?;
            let ours = format!("\"id\":\"monitor\",\"attempt\":0,\"pid\":{pid},");
            let recorded = |journal: &str| {
                journal.lines().any(|line| {
                    line.contains(&ours) && line.contains("has no master") && line.contains("/host")
                })
            };
            let journal = Path::new("/run/bindguard/journal.jsonl");
            until("the container's own mount is in the journal", || {
                Ok(recorded(
                    &fs::read_to_string(journal).context("read the journal")?,
                ))
            })?;
            node.wait_for_log("the same", |line| {
                line.contains("bindguard: bind of / at /host") && line.contains("no master")
            })?;
            ctr.remove("monitor")
        });
}

/// Issue 14: `ro` does not cover mounts that the host makes after the container's start, and rslave
/// lets them in.
#[test]
fn a_read_only_bind_is_open_to_later_mounts_unless_it_is_kept() {
    let (read_only, recursively) = (["rbind", "rprivate", "ro"], ["rbind", "rprivate", "rro"]);
    Setup::on(Generation::NEWEST).story(|node| {
        ensure!(
            container_writes_to_a_later_mount(node, &read_only)?,
            "bindguard did not make the bind rslave"
        );
        ensure!(
            !container_writes_to_a_later_mount(node, &recursively)?,
            "bindguard changed an rro bind"
        );
        node.wait_for_log("the rro bind", |line| {
            line.contains("bindguard: bind of /run") && line.contains("(rro)")
        })
    });
    Setup::on(Generation::NEWEST)
        .policy("[host-root]\nread-only = \"keep\"\n")
        .story(|node| {
            ensure!(
                !container_writes_to_a_later_mount(node, &read_only)?,
                "bindguard did not keep the bind"
            );
            let is_report = |line: &str| {
                line.contains("bindguard: bind of /run") && line.contains("policy keeps")
            };
            node.wait_for_log("the kept bind", is_report)
        });
}

/// `ro` covers the host's `/` alone. With default capabilities a container writes to the host's
/// `/run` and to the root filesystems of other containers: under the stock shim to those that ran
/// before, under bindguard also to those that start later.
#[test]
fn a_read_only_host_root_writes_to_root_filesystems() {
    Setup::on(Generation::NEWEST).story(|node| {
        for (runtime, reached) in [
            (Runtime::Stock, [true, false]),
            (Runtime::Bindguard, [true, true]),
        ] {
            let written = monitor_writes_to_others(node, runtime)?;
            ensure!(
                written == reached,
                "{runtime:?}: [before, later] = {written:?}"
            );
        }
        Ok(())
    });
    Setup::on(Generation::NEWEST)
        .policy("[host-root]\nread-only = \"keep\"\n")
        .story(|node| {
            let written = monitor_writes_to_others(node, Runtime::Bindguard)?;
            ensure!(
                written == [true, false],
                "keep: [before, later] = {written:?}"
            );
            Ok(())
        });
}

/// True for a container that ran before the monitor, and for a container that started later, if each
/// finds a file that the monitor wrote to its root filesystem.
fn monitor_writes_to_others(node: &Node, runtime: Runtime) -> Result<[bool; 2]> {
    let ctr = node.ctr();
    let start = |id: &str| ctr.container(id).runtime(Runtime::Stock).start()?.success();
    start("before")?;
    ctr.container("monitor")
        .runtime(runtime)
        .mount(Bind::new("/", "/host").options(&["rbind", "rprivate", "ro"]))
        .start()?
        .success()?;
    start("later")?;
    let in_monitor = |script: &str| ctr.exec("monitor", &["sh", "-c", script]);
    in_monitor("echo x > /host/run/planted")?;
    fs::remove_file("/run/planted").context("find the file that the monitor wrote to /run")?;
    let (mut found, mut bundles) = ([false; 2], Vec::new());
    for (found, id) in found.iter_mut().zip(["before", "later"]) {
        let rootfs = mounts::table()?
            .into_iter()
            .map(|mount| mount.target)
            .find(|target| target.ends_with(format!("{id}/rootfs")))
            .with_context(|| format!("find the root filesystem of {id}"))?;
        in_monitor(&format!("echo x > /host{}/planted", rootfs.display()))?;
        *found = ctr.exec(id, &["test", "-e", "/planted"])?.code() == 0;
        bundles.push(rootfs.parent().context("a bundle")?.to_owned());
    }
    for id in ["later", "monitor", "before"] {
        ctr.remove(id)?;
    }
    // Without the mount, the file is in the folder below it, and keeps containerd from removing it.
    for bundle in bundles.iter().filter(|bundle| bundle.exists()) {
        fs::remove_dir_all(bundle).with_context(|| format!("remove {}", bundle.display()))?;
    }
    Ok(found)
}

/// True if a mount that the host makes after a container's start is in the container, and writable
/// there.
fn container_writes_to_a_later_mount(node: &Node, options: &[&str]) -> Result<bool> {
    let ctr = node.ctr();
    ctr.container("monitor")
        .mount(Bind::new("/run", "/host").options(options))
        .start()?
        .success()?;
    let pid = ctr.pid("monitor")?;
    let volume = HostVolume::mount_below(Path::new("/run"), node)?;
    let is_seen = volume.is_seen_by(pid)?;
    let written = fs::write(
        format!("/proc/{pid}/root/host/host-volume/file"),
        "written by the container",
    );
    ensure!(
        written.is_ok() == is_seen,
        "the volume is seen: {is_seen}; writing to it: {written:?}"
    );
    volume.unmount()?;
    ctr.remove("monitor")?;
    Ok(is_seen)
}

fn umount_reaches_the_container(
    node: &Node,
    runtime: Runtime,
    source: &Path,
    propagation: Option<&str>,
) -> Result<()> {
    let volume = HostVolume::mount_below(source, node)?;
    let options: Vec<&str> = ["rbind"].into_iter().chain(propagation).collect();
    let ctr = node.ctr();
    let mut container = ctr
        .container("monitor")
        .runtime(runtime)
        .mount(Bind::new(source, "/host").options(&options));
    if propagation == Some("rshared") {
        // as the CRI does for Bidirectional: crun makes everything private without it
        container = container
            .argument("--rootfs-propagation")
            .argument("rshared");
    }
    container.start()?.success()?;
    let pid = ctr.pid("monitor")?;

    let table = mounts::table_of(pid)?;
    let bind = table
        .iter()
        .find(|mount| mount.target == Path::new("/host"))
        .context("find /host in the container")?;
    let is_shared = bind
        .propagation
        .iter()
        .any(|field| field.starts_with("shared:"));
    ensure!(
        is_shared || bind.has_master(),
        "/host gets nothing from the host: {bind:?}"
    );
    ensure!(
        is_shared == (propagation == Some("rshared")),
        "requested {propagation:?}, got {bind:?}"
    );
    ensure!(
        volume.is_seen_by(pid)?,
        "the container never saw the host's volume"
    );

    volume.unmount()?;
    ensure!(
        !volume.is_seen_by(pid)?,
        "the container still holds the host's volume"
    );
    ctr.remove("monitor")
}

/// Makes a test for each runc and crun of the matrix, beside the containerd of its time.
macro_rules! on_every_runtime {
    ($story:ident, $($name:ident: $generation:expr, $oci:expr;)+) => {
        mod $story {
            use super::*;

            $(#[test]
            fn $name() {
                Setup::on($generation)
                    .oci($oci)
                    .story(|node| super::$story(node, $oci));
            })+
        }
    };
}

on_every_runtime! {
    mounts_are_those_of_the_stock_runtime,
    runc_1_1: Generation::V1_7, Oci::Runc(Generation::V1_7);
    runc_1_3: Generation::NEWEST, Oci::Runc(Generation::V2_1);
    runc_1_4: Generation::NEWEST, Oci::Runc(Generation::V2_3);
    runc_1_5: Generation::NEWEST, Oci::Runc(Generation::NEWEST);
    crun_1_21: Generation::V1_7, Oci::Crun(Generation::V1_7);
    crun: Generation::NEWEST, Oci::Crun(Generation::NEWEST);
}

/// The mounts of the host that a container shows are those that the runtime alone would make: crun
/// binds recursively for every propagation word that begins with an r. A bind without the host's
/// mounts also stays without the mounts that the host makes later.
fn mounts_are_those_of_the_stock_runtime(node: &Node, oci: Oci) -> Result<()> {
    let scene = HostRootBundle::lay_out(node)?;
    let mut wrong = Vec::new();
    for options in combinations() {
        let stock = scene.mounts_made_by("runc", &options)?;
        let ours = scene.mounts_made_by(GUARD, &options)?;
        // The type `bind` alone is no bind for a runtime: its mount(2) fails.
        let is_bind = options.iter().any(|it| ["bind", "rbind"].contains(it));
        let (Some(stock), Some(ours)) = (&stock, &ours) else {
            ensure!(
                stock.is_none() && ours.is_none() && !is_bind,
                "{options:?}: stock {stock:?}, bindguard {ours:?}: {}",
                scene.log()?
            );
            continue;
        };
        let takes_words = matches!(oci, Oci::Crun(_)) && options.iter().any(|it| is_recursive(it));
        let is_single = options.contains(&"bind") && !takes_words;
        ensure!(
            is_single == (stock.at_create.len() == 1),
            "{options:?}: stock made {stock:?}"
        );
        if stock.at_create != ours.at_create {
            let differ = stock.at_create.symmetric_difference(&ours.at_create);
            let differ: Vec<_> = differ.take(3).collect();
            wrong.push(format!(
                "{options:?}: {} mounts become {}, such as {differ:?}",
                stock.at_create.len(),
                ours.at_create.len()
            ));
        } else if is_single && stock.has_later != ours.has_later {
            wrong.push(format!("{options:?}: a later mount of the host arrives"));
        }
    }
    ensure!(wrong.is_empty(), "{oci}: {}", wrong.join("\n"));
    // The same under the shim, which also proves the mounts.
    let ctr = node.ctr();
    ctr.container("monitor")
        .mount(Bind::new("/", "/host").options(&["bind", "private", "ro"]))
        .start()?
        .success()?;
    let mut table = mounts::table_of(ctr.pid("monitor")?)?;
    table.retain(|mount| mount.target.starts_with("/host"));
    ensure!(
        table.len() == 1 && table[0].is_read_only,
        "under the shim: {table:?}"
    );
    ctr.remove("monitor")?;
    scene.delete()
}

/// Every form of a bind, with every propagation word before and after the form, writable and
/// read-only.
fn combinations() -> Vec<Vec<&'static str>> {
    const WORDS: [&str; 8] = [
        "private",
        "rprivate",
        "slave",
        "rslave",
        "shared",
        "rshared",
        "unbindable",
        "runbindable",
    ];
    let mut all = Vec::new();
    for form in [None, Some("bind"), Some("rbind")] {
        let form: Vec<&str> = form.into_iter().collect();
        let mut orders = vec![form.clone()];
        for word in WORDS {
            orders.push([&[word], &form[..]].concat());
            if !form.is_empty() {
                orders.push([&form[..], &[word]].concat());
            }
        }
        for options in orders {
            all.push([&options[..], &["ro"]].concat());
            all.push(options);
        }
    }
    all
}

fn is_recursive(word: &str) -> bool {
    word.starts_with('r') && word != "ro"
}

/// A bundle with the host's `/` at `/host`, and a tmpfs of the host that root alone may read.
struct HostRootBundle<'n> {
    node: &'n Node,
    path: PathBuf,
    secret: PathBuf,
}

/// A container's mounts at and below `/host`.
#[derive(Debug)]
struct HostMounts {
    /// The places, and if they are read-only.
    at_create: BTreeSet<(PathBuf, bool)>,
    /// True if a mount that the host made after the create arrived.
    has_later: bool,
}

impl<'n> HostRootBundle<'n> {
    fn lay_out(node: &'n Node) -> Result<Self> {
        // Not on the host's `/`: runc makes the mount private that a root filesystem lies on.
        let path = node.disk().join("containerd/host-root");
        let secret = node.disk().join("secret");
        image::lay_out(&path.join("rootfs"))?;
        fs::create_dir(&secret).context("create a folder")?;
        tmpfs(&secret, "mode=700,size=1m")?;
        Ok(Self { node, path, secret })
    }

    /// The mounts of a container that a program of the node created; `None` if it could not.
    fn mounts_made_by(&self, program: &str, options: &[&str]) -> Result<Option<HostMounts>> {
        let folder = match program {
            GUARD => self.node.under_test(),
            _ => &self.node.programs(),
        };
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {"args": ["sleep", "60"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/host", "type": "bind", "source": "/", "options": options},
            ],
            "linux": {
                "cgroupsPath": self.node.cgroups_path("host-root"),
                "namespaces": [{"type": "pid"}, {"type": "mount"}],
            },
        });
        fs::write(self.path.join("config.json"), spec.to_string()).context("write the spec")?;
        let call = |words: &[&str]| -> Result<bool> {
            let mut command = self.node.command(folder.join(program))?;
            command.arg("--root").arg(self.path.join("state"));
            command.args(words).current_dir(&self.path);
            let log = File::create(self.path.join("log")).context("create a log")?;
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let status = command.stderr(log).status();
            Ok(status.with_context(|| format!("run {program}"))?.success())
        };
        if !call(&["create", "--bundle", ".", "--pid-file", "pid", "c1"])? {
            return Ok(None);
        }
        let pid = fs::read_to_string(self.path.join("pid")).context("read the pid file")?;
        let table = || -> Result<Vec<mounts::Mount>> {
            let mut table = mounts::table_of(pid.trim().parse()?)?;
            table.retain(|mount| mount.target.starts_with("/host"));
            Ok(table)
        };
        let at_create = table()?;
        let later = HostVolume::mount_below(self.node.disk(), self.node)?;
        let has_later = table()?.len() > at_create.len();
        later.unmount()?;
        ensure!(call(&["delete", "--force", "c1"])?, "delete the container");
        let places = at_create.into_iter();
        let made = HostMounts {
            at_create: places
                .map(|mount| (mount.target, mount.is_read_only))
                .collect(),
            has_later,
        };
        let in_container = Path::new("/host").join(self.secret.strip_prefix("/")?);
        let shows_secret = made.at_create.iter().any(|(at, _)| *at == in_container);
        ensure!(
            shows_secret == (made.at_create.len() > 1),
            "{options:?}: the secret is shown: {shows_secret}"
        );
        Ok(Some(made))
    }

    /// The words of the last failure.
    fn log(&self) -> Result<String> {
        fs::read_to_string(self.path.join("log")).context("read the log")
    }

    fn delete(self) -> Result<()> {
        unmount(&self.secret)
    }
}

/// A tmpfs that the host mounts somewhere below a source, and wants back.
struct HostVolume(PathBuf);

impl HostVolume {
    fn mount_below(source: &Path, node: &Node) -> Result<Self> {
        let below = if node.disk().starts_with(source) {
            node.disk()
        } else {
            source
        };
        let folder = below.join("host-volume");
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        tmpfs(&folder, "size=1m")?;
        Ok(Self(folder))
    }

    fn unmount(&self) -> Result<()> {
        unmount(&self.0)
    }

    fn is_seen_by(&self, pid: u32) -> Result<bool> {
        let name = self.0.file_name().context("a volume has a name")?;
        Ok(mounts::table_of(pid)?
            .iter()
            .any(|mount| mount.target.starts_with("/host") && mount.target.ends_with(name)))
    }
}
