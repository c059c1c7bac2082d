//! The disk of the bundle, of the runtime's state or of a log is full, or has become read-only:
//! what cannot be done is refused with a reason and leaves nothing, what runs can be killed, and
//! when there is room again it can be deleted.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write;

use bindguard_integration::shim::{Bundle, Client, Shim, spec};
use containerd_shim_protos::api::{CreateTaskRequest, ExecProcessRequest};
use containerd_shim_protos::shim::oci::Options;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::statvfs;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        for state in [State::Full, State::ReadOnly] {
            bundle(node, state).with_context(|| format!("a bundle that is {state:?}"))?;
            before
                .are_all(node)
                .with_context(|| format!("a bundle that is {state:?}"))?;
            runtimes_state(node, state)
                .with_context(|| format!("a state of runc that is {state:?}"))?;
            before
                .are_all(node)
                .with_context(|| format!("a state of runc that is {state:?}"))?;
        }
        log_file(node)?;
        before.are_all(node)
    });
}

#[derive(Clone, Copy, Debug)]
enum State {
    Full,
    ReadOnly,
}

/// A small disk of its own; it goes with the value.
struct Disk(PathBuf);

impl Disk {
    fn on(path: &Path) -> Result<Self> {
        fs::create_dir_all(path)?;
        tmpfs(path, "mode=755,size=256k,nr_inodes=64")?;
        Ok(Self(path.to_owned()))
    }

    fn spoil(&self, state: State) -> Result<()> {
        match state {
            State::ReadOnly => self.remount(MsFlags::MS_RDONLY),
            State::Full => {
                let mut filler = File::create(self.0.join("filler"))?;
                while filler.write_all(&[0; 4096]).is_ok() {}
                // no room for a new name either
                let names = (0..64).map(|number| self.0.join(format!("filler-{number}")));
                for name in names.take_while(|name| File::create(name).is_ok()) {
                    drop(name);
                }
                Ok(())
            }
        }
    }

    fn restore(&self) -> Result<()> {
        self.remount(MsFlags::empty())?;
        for entry in fs::read_dir(&self.0)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("filler") {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    fn remount(&self, flags: MsFlags) -> Result<()> {
        let flags = flags | MsFlags::MS_REMOUNT;
        mount(None::<&str>, &self.0, None::<&str>, flags, None::<&str>)
            .context("remount a small disk")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(errno) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {errno}", self.0.display());
        }
    }
}

fn begin(node: &Node, bundle: &Bundle) -> Result<Client> {
    Shim::start(node, bundle, &Options::default())?.connect()
}

fn refused(client: &Client, request: &CreateTaskRequest) -> Result<()> {
    let error = client
        .create(request)
        .err()
        .context("it was created")?
        .to_string();
    ensure!(
        error.contains("os error 28") || error.contains("space") || error.contains("ead-only"),
        "{error}"
    );
    Ok(())
}

fn bundle(node: &Node, state: State) -> Result<()> {
    let place = Path::new("/run/small/web");
    let disk = Disk::on(place)?;
    let bundle = Bundle::create_at(
        node,
        place,
        "web",
        &spec(node, "web", &["sleep", "1000000"]),
    )?;
    let client = begin(node, &bundle)?;
    disk.spoil(state)?;
    refused(&client, &bundle.request())?;
    disk.restore()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    disk.spoil(state)?;
    let (id, exec_id) = ("web".to_owned(), "e".to_owned());
    client.exec(
        ExecProcessRequest {
            id,
            exec_id,
            ..Default::default()
        },
        &["true"],
    )?;
    ensure!(
        client.start("web", "e").is_err(),
        "an exec was started without room for its process"
    );
    client.delete("web", "e")?;
    // what runs can still be killed and deleted
    ensure!(client.end("web")?.exit_status == 137);
    disk.restore()?;
    Ok(client.shut_down("web")?)
}

fn runtimes_state(node: &Node, state: State) -> Result<()> {
    let root = format!("/run/containerd/runc/{}", node.name());
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let client = begin(node, &bundle)?;
    let disk = Disk::on(Path::new(&root))?;
    disk.spoil(state)?;
    ensure!(
        client.create(&bundle.request()).is_err(),
        "it was created without room for runc's state"
    );
    disk.restore()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    disk.spoil(state)?;
    client.kill("web", "", 9)?;
    ensure!(client.wait("web", "")? == 137);
    // runc may be unable to remove its state now; then it is able to when the disk is as it was
    if client.delete("web", "").is_err() {
        disk.restore()?;
        client.delete("web", "")?;
    }
    Ok(client.shut_down("web")?)
}

/// A full disk costs lines of a log, and nothing else: the process does not wait for room.
fn log_file(node: &Node) -> Result<()> {
    let place = Path::new("/run/small-log");
    let disk = Disk::on(place)?;
    let file = place.join("web.log");
    let bundle = Bundle::create(
        node,
        "web",
        &["sh", "-c", "head -c 2000000 /dev/zero; exit 6"],
    )?;
    let client = begin(node, &bundle)?;
    let mut request = bundle.request();
    request.stdout = format!("file://{}", file.display());
    client.create(&request)?;
    client.start("web", "")?;
    ensure!(client.wait("web", "")? == 6);
    client.delete("web", "")?;
    let length = fs::metadata(&file)?.len();
    ensure!(
        length > 100_000 && length < 2_000_000,
        "{length} bytes are in the log"
    );
    drop(disk);
    Ok(client.shut_down("web")?)
}

/// bindguard's own files in `/run` are what a create can do without.
#[test]
fn a_create_needs_no_more_room_than_that_of_the_stock_shim() {
    Setup::on(Generation::NEWEST).story(|node| {
        let ctr = node.ctr();
        let needed = |runtime| {
            let mut failures = Vec::new();
            for room in (16..200).step_by(4) {
                let ended = with_room(room, || {
                    let volume = Bind::new(node.disk(), "/volume");
                    let container = ctr.container("web").runtime(runtime);
                    container.mount(volume).runs(&["true"]).run()
                })?;
                ctr.forget("web").ok();
                if ended.status.success() {
                    return Ok((room, failures));
                }
                failures.push(format!("{room} KiB: {}", ended.stderr));
            }
            bail!("{runtime:?} needs more room than there is: {failures:?}");
        };
        let (stock, _) = needed(Runtime::Stock)?;
        let (guarded, failures) = needed(Runtime::Bindguard)?;
        // the file `address`, which the shim of containerd 1.x writes as well
        ensure!(
            guarded <= stock + 4,
            "stock needs {stock} KiB, bindguard {guarded}: {failures:#?}"
        );
        let blames_bindguard = failures.iter().any(|it| it.contains("append to"));
        ensure!(!blames_bindguard, "not the runtime's error: {failures:#?}");
        Ok(())
    });
}

/// Does this while `/run` has so many KiB free.
fn with_room<T>(kib: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let resize = |size: u64| {
        let size = format!("size={}k", size / 1024);
        let flags = MsFlags::MS_REMOUNT;
        mount(None::<&str>, "/run", None::<&str>, flags, Some(&*size)).context("resize /run")
    };
    let run = statvfs("/run")?;
    let used = (run.blocks() - run.blocks_free()) * run.fragment_size();
    resize(used + kib * 1024)?;
    let done = work();
    resize(run.blocks() * run.fragment_size())?;
    done
}
