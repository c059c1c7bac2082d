//! `make soak`: a pod's shim runs a thousand containers in sequence, fifty at once, and five
//! hundred execs. The shim copies a hundred megabytes each way through a pipe and a terminal.
//! Afterwards the shim uses no more memory than after the first fifty containers at once: the
//! allocator keeps partly used pages, so this burst is the peak. Prints the figures.
//!
//! Small versions in `make test` are exec_storm_leaves_nothing_behind, fifty_containers_at_once and
//! streams_lose_nothing.

use bindguard_integration::prelude::*;
use std::fs::OpenOptions;
use std::io::{Read, Write};

use bindguard_integration::footprint::Footprint;
use bindguard_integration::shim::{Client, Shim};
use containerd_shim_protos::api::ExecProcessRequest;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

const GROUP: &str = "io.containerd.runc.v2.group";
const IN_A_ROW: usize = 1_000;
const AT_ONCE: usize = 50;
const EXECS: usize = 500;
const MEGABYTES: usize = 100;

#[test]
#[ignore = "takes many minutes: make soak"]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let nothing = Leftovers::of(node)?;
    node.ctr()
        .container("sandbox")
        .annotation(GROUP, "pod")
        .start()?
        .success()?;
    let shim = *node.shims()?.first().context("find the shim")?;
    at_once(node)?;
    let (before, begun) = (Footprint::at_rest(shim)?, Leftovers::of(node)?);
    eprintln!("after the first {AT_ONCE} containers: {before:?}");
    let check = |what: &str, begin: Instant| -> Result<()> {
        begun.are_all(node).with_context(|| what.to_owned())?;
        let now = Footprint::at_rest(shim)?;
        eprintln!("{what}, in {:.0?}: {now:?}", begin.elapsed());
        now.has_not_grown_since(&before)
            .with_context(|| what.to_owned())
    };
    let begin = Instant::now();
    in_a_row(node, IN_A_ROW)?;
    check(&format!("{IN_A_ROW} containers in a row"), begin)?;
    let begin = Instant::now();
    at_once(node)?;
    check(&format!("{AT_ONCE} containers at once"), begin)?;
    let begin = Instant::now();
    execs(node)?;
    check(&format!("{EXECS} execs"), begin)?;
    for (terminal, input) in [(false, false), (false, true), (true, false), (true, true)] {
        let (by, way) = (
            if terminal { "a terminal" } else { "a pipe" },
            if input { "in" } else { "out" },
        );
        let begin = Instant::now();
        stream(node, terminal, input).with_context(|| format!("{way} by {by}"))?;
        check(&format!("{MEGABYTES} MB {way} by {by}"), begin)?;
    }
    node.ctr().remove("sandbox")?;
    nothing.are_all(node)
}

fn start(node: &Node, number: usize) -> Result<Child> {
    let (ctr, id) = (node.ctr(), format!("c{number}"));
    let script = format!("exit {}", number % 100 + 1);
    let container = ctr
        .container(&id)
        .annotation(GROUP, "pod")
        .runs(&["sh", "-c", &script]);
    container
        .command(&["--rm"])
        .spawn()
        .with_context(|| format!("start {id}"))
}

fn ends_well(number: usize, mut container: Child) -> Result<()> {
    let code = container.wait()?.code();
    ensure!(
        code == i32::try_from(number % 100 + 1).ok(),
        "container {number} ended with {code:?}"
    );
    Ok(())
}

fn in_a_row(node: &Node, count: usize) -> Result<()> {
    (0..count).try_for_each(|number| ends_well(number, start(node, number)?))
}

fn at_once(node: &Node) -> Result<()> {
    let running: Vec<Child> = (0..AT_ONCE)
        .map(|number| start(node, number))
        .collect::<Result<_>>()?;
    running
        .into_iter()
        .enumerate()
        .try_for_each(|(number, container)| ends_well(number, container))
}

fn execs(node: &Node) -> Result<()> {
    (0..EXECS).try_for_each(|number| {
        let status = number % 256;
        let ended = node
            .ctr()
            .exec("sandbox", &["sh", "-c", &format!("exit {status}")])?;
        ensure!(
            ended.code() == i32::try_from(status)?,
            "exec {number} ended with {}",
            ended.code()
        );
        Ok(())
    })
}

/// An exec that writes or counts bytes. The test opens the client's ends of the fifos, like a
/// client of containerd.
fn stream(node: &Node, terminal: bool, input: bool) -> Result<()> {
    let client = Shim::of_container(node, "sandbox")?.connect()?;
    let folder = node.disk().join(format!("fifos-{terminal}-{input}"));
    fs::create_dir(&folder)?;
    let [stdin, stdout] = ["in", "out"].map(|name| folder.join(name));
    for fifo in [&stdin, &stdout] {
        mkfifo(fifo, Mode::from_bits_truncate(0o600))
            .with_context(|| format!("make {}", fifo.display()))?;
    }
    let raw = if terminal {
        "stty raw -echo; echo; "
    } else {
        "echo; "
    };
    let bytes = MEGABYTES * 1_000_000;
    let script = match input {
        true => format!("{raw} head -c {bytes} | wc -c"),
        false => format!("{raw} head -c {bytes} /dev/zero"),
    };
    let text = |path: &Path| path.display().to_string();
    let request = ExecProcessRequest {
        id: "sandbox".to_owned(),
        exec_id: "stream".to_owned(),
        stdin: text(&stdin),
        stdout: text(&stdout),
        terminal,
        ..Default::default()
    };
    client.exec(request, &["sh", "-c", &script])?;
    let read = pass(&client, stdin, stdout, if input { bytes } else { 0 })?;
    match input {
        true => ensure!(
            String::from_utf8_lossy(&read.tail).trim() == bytes.to_string(),
            "{read:?}"
        ),
        false => ensure!(
            read.bytes == bytes + read.begin,
            "{} bytes of {bytes} arrived",
            read.bytes
        ),
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Received {
    bytes: usize,
    /// The line that says that the terminal is raw.
    begin: usize,
    tail: Vec<u8>,
}

/// Starts the exec, writes its input, reads its output, and deletes the exec.
fn pass(client: &Client, stdin: PathBuf, stdout: PathBuf, feed: usize) -> Result<Received> {
    let mut out = OpenOptions::new().read(true).write(true).open(&stdout)?;
    client.start("sandbox", "stream")?;
    let mut input = OpenOptions::new().write(true).open(&stdin)?;
    let mut read = Received::default();
    // the writer of this end must be the shim alone, for the end to be seen
    let mut reader = OpenOptions::new().read(true).open(&stdout)?;
    let mut buffer = vec![0; 1 << 16];
    while !buffer[..read.begin].contains(&b'\n') {
        let length = out.read(&mut buffer[read.begin..])?;
        read.begin += length;
    }
    drop(out);
    let newline = buffer
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or_default()
        + 1;
    (read.bytes, read.begin) = (read.begin, newline);
    let feeding = thread::spawn(move || -> std::io::Result<()> {
        let chunk = vec![b'x'; 1 << 16];
        let mut left = feed;
        while left > 0 {
            let length = left.min(chunk.len());
            input.write_all(&chunk[..length])?;
            left -= length;
        }
        Ok(())
    });
    let waiting = client.state("sandbox", "stream").context("is it there?")?;
    ensure!(waiting.pid > 0);
    let reading = thread::spawn(move || -> std::io::Result<(usize, Vec<u8>)> {
        let (mut bytes, mut tail) = (0, Vec::new());
        loop {
            match reader.read(&mut buffer)? {
                0 => return Ok((bytes, tail)),
                length => {
                    bytes += length;
                    tail = buffer[..length.min(64)].to_vec();
                }
            }
        }
    });
    feeding
        .join()
        .ok()
        .context("join the thread that feeds")??;
    ensure!(client.wait("sandbox", "stream")? == 0);
    client.delete("sandbox", "stream")?;
    let (bytes, tail) = reading
        .join()
        .ok()
        .context("join the thread that reads")??;
    read.bytes += bytes;
    read.tail = tail;
    Ok(read)
}
