//! The configMap changes between the guard's check and the runtime's mount, and the shim creates
//! the container a second time. The log begins with the container's first line. Without a retry the
//! log file has the runtime's message (issue 14, item 14).

use bindguard_integration::prelude::*;
use std::fs::{File, OpenOptions, Permissions};
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

use bindguard_integration::programs::Oci;
use bindguard_integration::runtime::{Gate, ObedientRuntime};
use bindguard_integration::shim::{Bundle, Client, Shim, spec};
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::shim::oci::Options;
use nix::libc::O_NONBLOCK;

const SCRIPT: [&str; 3] = ["sh", "-c", "cat /etc/app.conf; echo err >&2"];

#[test]
fn runc() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            story(node)?;
            before.are_all(node)
        });
}

/// The guard breaks, and the container is made without it.
#[test]
fn no_guard() {
    Setup::on(Generation::NEWEST).story(|node| {
        let guard = node.programs().join(GUARD);
        // it may be a link to the program under test
        fs::remove_file(&guard)?;
        fs::write(&guard, "#!/bin/sh\necho broken >&2\nexit 1\n")?;
        fs::set_permissions(&guard, Permissions::from_mode(0o755))?;
        let bundle = Bundle::create(node, "unguarded", &["echo", "its own"])?;
        let mut streams = Streams::open(Kind::File, node, &bundle)?;
        let mut request = bundle.request();
        streams.are_of(&mut request);
        let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
        client.create(&request)?;
        client.start("unguarded", "")?;
        end(&client, "unguarded")?;
        let written = streams.written()?;
        ensure!(written == ["its own\n"; 2], "its log: {written:?}");
        Ok(())
    });
}

/// Without a check of leftovers: crun makes a directory where a node of this machine has no unified
/// hierarchy.
#[test]
fn crun() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Crun(Generation::NEWEST))
        .obedient_runtime()
        .story(story);
}

#[test]
fn runc_1_4() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Runc(Generation::V2_3))
        .obedient_runtime()
        .story(story);
}

fn story(node: &Node) -> Result<()> {
    for kind in [
        Kind::Fifos,
        Kind::File,
        Kind::TwoFiles,
        Kind::Terminal,
        Kind::TerminalIntoAFile,
    ] {
        starts_at_the_second_try(node, kind).with_context(|| format!("{kind:?}"))?;
    }
    fails_for_good(node)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fifos,
    File,
    TwoFiles,
    Terminal,
    TerminalIntoAFile,
}

impl Kind {
    fn has_terminal(self) -> bool {
        matches!(self, Self::Terminal | Self::TerminalIntoAFile)
    }
}

/// The destinations of a container's output.
struct Streams {
    kind: Kind,
    files: [PathBuf; 2],
    fifos: Vec<File>,
}

impl Streams {
    fn open(kind: Kind, node: &Node, bundle: &Bundle) -> Result<Self> {
        let is_fifo = matches!(kind, Kind::Fifos | Kind::Terminal);
        let file = |name: &str| match is_fifo {
            true => bundle.fifo(name),
            false => Ok(node.disk().join(format!("{}-{name}.log", bundle.id()))),
        };
        let out = file("out")?;
        let err = if matches!(kind, Kind::Fifos | Kind::TwoFiles) {
            file("err")?
        } else {
            out.clone()
        };
        let files = [out, err];
        // open for both, so that the open does not wait for a writer and the fifo never ends
        let open = |path: &PathBuf| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(O_NONBLOCK)
                .open(path)
        };
        let fifos = if is_fifo {
            files.iter().map(open).collect::<Result<_, _>>()?
        } else {
            Vec::new()
        };
        Ok(Self { kind, files, fifos })
    }

    fn are_of(&self, request: &mut CreateTaskRequest) {
        let scheme = if self.fifos.is_empty() { "file://" } else { "" };
        let [out, err] = self
            .files
            .each_ref()
            .map(|file| format!("{scheme}{}", file.display()));
        request.terminal = self.kind.has_terminal();
        request.stdout = out;
        if !request.terminal {
            request.stderr = err;
        }
    }

    /// The whole content of each file.
    fn written(&mut self) -> Result<[String; 2]> {
        let mut texts = [String::new(), String::new()];
        for (at, text) in texts.iter_mut().enumerate() {
            match self.fifos.get_mut(at) {
                // EAGAIN: the fifo is empty
                Some(fifo) => drop(fifo.read_to_string(text)),
                None => *text = fs::read_to_string(&self.files[at])?,
            }
        }
        Ok(texts)
    }
}

fn starts_at_the_second_try(node: &Node, kind: Kind) -> Result<()> {
    let id = format!("{kind:?}").to_lowercase();
    let pod = node.kubelet().pod(&id)?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one\n")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mut spec = spec(node, &id, &SCRIPT);
    let options = ["rbind", "rprivate", "ro"];
    let bind = json!({"destination": "/etc/app.conf", "type": "bind", "source": subpath.bind()?, "options": options});
    spec["mounts"]
        .as_array_mut()
        .context("the spec has no mounts")?
        .push(bind);
    spec["process"]["terminal"] = kind.has_terminal().into();
    let bundle = Bundle::create_with(node, &id, &spec)?;
    let mut streams = Streams::open(kind, node, &bundle)?;
    let mut request = bundle.request();
    streams.are_of(&mut request);

    let (runtime, gate) = (
        ObedientRuntime::of(&node.programs()),
        Gate::of(&node.programs()),
    );
    let calls = creates(&runtime)?;
    gate.close()?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let client = thread::scope(|scope| {
        let create = scope.spawn(|| client.create(&request).map(|_| client));
        let update = gate
            .wait_for_call()
            .and_then(|()| volume.update(&[("app.conf", "two\n")]));
        gate.open()?;
        let client = create
            .join()
            .map_err(|_| anyhow!("the creating thread panicked"))??;
        update.map(|()| client)
    })?;
    ensure!(
        creates(&runtime)? == calls + 2,
        "not two tries: {:?}",
        runtime.calls()?
    );
    only_a_current_mount(&subpath)?;
    client.start(&id, "")?;
    end(&client, &id)?;

    let written = streams.written()?;
    let expected = match kind {
        Kind::Fifos | Kind::TwoFiles => ["two\n", "err\n"],
        Kind::File => ["two\nerr\n"; 2],
        Kind::Terminal => ["two\r\nerr\r\n", ""],
        Kind::TerminalIntoAFile => ["two\r\nerr\r\n"; 2],
    };
    ensure!(written == expected, "its log: {written:?}");
    pod.delete()
}

/// The container's program is not there: that no repair can help.
fn fails_for_good(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "hopeless", &["/no/such/program"])?;
    let mut streams = Streams::open(Kind::File, node, &bundle)?;
    let mut request = bundle.request();
    streams.are_of(&mut request);
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let error = match client.create(&request) {
        Err(error) => error.to_string(),
        // crun searches for the program when it starts it
        Ok(_) => client
            .start("hopeless", "")
            .err()
            .context("it was started")?
            .to_string(),
    };
    ensure!(error.contains("/no/such/program"), "{error}");
    let _ = client.delete("hopeless", "");
    until("the log file has the runtime's words", || {
        Ok(streams.written()?[0].contains("/no/such/program"))
    })?;
    Ok(client.shut_down("hopeless")?)
}

fn creates(runtime: &ObedientRuntime) -> Result<usize> {
    let calls = runtime.calls().unwrap_or_default();
    Ok(calls
        .iter()
        .filter(|call| call.split(' ').any(|word| word == "create"))
        .count())
}

fn end(client: &Client, id: &str) -> Result<()> {
    let status = client.wait(id, "")?;
    client.delete(id, "")?;
    client.shut_down(id)?;
    ensure!(status == 0, "{status}");
    Ok(())
}
