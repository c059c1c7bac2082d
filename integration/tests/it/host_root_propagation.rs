//! A container with a part of the host mounted must not keep the host's mounts alive
//! (containerd#3667).
//!
//! With whatever propagation it requests, an unmount on the host reaches it, with runc and with
//! crun; a bind that requested rshared stays shared. On a host whose `/` is private nothing can
//! reach it: bindguard says so, and the container starts.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bindguard_integration::mount_calls::{tmpfs, unmount};
use bindguard_integration::node::HostRoot;
use bindguard_integration::waiting::until;
use bindguard_integration::{
    Bind, Generation, Node, Oci, Runtime, Setup, mounts, on_every_generation,
};

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
    every_source_and_option(Oci::Runc(Generation::V2_1));
}

#[test]
fn next_runc() {
    every_source_and_option(Oci::NextRunc);
}

#[test]
fn crun() {
    every_source_and_option(Oci::Crun(Generation::V2_1));
}

fn every_source_and_option(oci: Oci) {
    Setup::on(Generation::V2_1).oci(oci).story(|node| {
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
    Setup::on(Generation::V2_1)
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
    Setup::on(Generation::V2_1).story(|node| {
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
    Setup::on(Generation::V2_1)
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
