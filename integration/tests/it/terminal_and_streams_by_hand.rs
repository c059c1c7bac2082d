//! The stream features that `ctr` cannot request: the size of a terminal, a terminal into a logging
//! program or a file, and that a process has no descriptor beyond its three.

use bindguard_integration::prelude::*;
use bindguard_integration::shim::{Bundle, Client, Shim, spec};
use containerd_shim_protos::api::{CreateTaskRequest, ExecProcessRequest};
use containerd_shim_protos::shim::oci::Options;

/// Waits until its size is set, so that there is no race with the resize.
const SIZE: &str = "until stty size 2>/dev/null | grep -q '33 121'; do sleep 0.02; done; stty size";
const LOGGER: &str = "#!/bin/sh\necho ready >&5; exec 5>&-\ncat <&3 > $0.out\ncat <&4 > $0.err\n";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        resize(node)?;
        terminal_into_a_program(node)?;
        terminal_into_a_file(node)?;
        files_and_devices(node)?;
        no_other_descriptors(node)?;
        before.are_all(node)
    });
}

fn with_a_terminal(node: &Node, id: &str, script: &str) -> Result<Bundle> {
    let mut spec = spec(node, id, &["sh", "-c", script]);
    spec["process"]["terminal"] = true.into();
    Bundle::create_with(node, id, &spec)
}

/// Creates and starts the bundle's container.
fn begin(
    node: &Node,
    bundle: &Bundle,
    change: impl FnOnce(&mut CreateTaskRequest),
) -> Result<Client> {
    let client = Shim::start(node, bundle, &Options::default())?.connect()?;
    let mut request = bundle.request();
    change(&mut request);
    client.create(&request)?;
    client.start(bundle.id(), "")?;
    Ok(client)
}

fn end(client: &Client, id: &str) -> Result<u32> {
    let status = client.wait(id, "")?;
    client.delete(id, "")?;
    client.shut_down(id)?;
    Ok(status)
}

fn resize(node: &Node) -> Result<()> {
    let bundle = with_a_terminal(node, "sized", SIZE)?;
    let out = node.disk().join("sized.log");
    let log = format!("file://{}", out.display());
    let client = begin(node, &bundle, |request| {
        request.terminal = true;
        request.stdout.clone_from(&log);
    })?;
    let exec_out = node.disk().join("sized-exec.log");
    let (id, exec_id, stdout) = (
        "sized".to_owned(),
        "e".to_owned(),
        format!("file://{}", exec_out.display()),
    );
    let exec = ExecProcessRequest {
        id,
        exec_id,
        stdout,
        terminal: true,
        ..Default::default()
    };
    client.exec(exec, &["sh", "-c", SIZE])?;
    client.start("sized", "e")?;
    // A size has 16 bits: as in the stock shim, the higher bits are dropped.
    client.resize("sized", "e", 65_536 + 121, 33)?;
    ensure!(client.wait("sized", "e")? == 0);
    client.delete("sized", "e")?;
    ensure!(
        fs::read_to_string(&exec_out)?.trim() == "33 121",
        "the exec's: {:?}",
        fs::read_to_string(&exec_out)?
    );
    client.resize("sized", "", 121, 33)?;
    ensure!(end(&client, "sized")? == 0);
    ensure!(
        fs::read_to_string(&out)?.trim() == "33 121",
        "the init's: {:?}",
        fs::read_to_string(&out)?
    );
    Ok(())
}

fn terminal_into_a_program(node: &Node) -> Result<()> {
    let logger = node.disk().join("logger");
    write_program(&logger, LOGGER)?;
    let bundle = with_a_terminal(node, "logged", "tty; echo out; echo err >&2")?;
    let client = begin(node, &bundle, |request| {
        request.terminal = true;
        request.stdout = format!("binary://{}", logger.display());
    })?;
    ensure!(end(&client, "logged")? == 0);
    let (out, err) = (
        fs::read_to_string(logger.with_extension("out"))?,
        fs::read(logger.with_extension("err"))?,
    );
    ensure!(
        out == "/dev/pts/0\r\nout\r\nerr\r\n" && err.is_empty(),
        "{out:?}, {err:?}"
    );
    Ok(())
}

fn terminal_into_a_file(node: &Node) -> Result<()> {
    let file = node.disk().join("terminal.log");
    let bundle = with_a_terminal(node, "filed", "echo one; echo two >&2")?;
    let client = begin(node, &bundle, |request| {
        request.terminal = true;
        request.stdout = format!("file://{}", file.display());
    })?;
    ensure!(end(&client, "filed")? == 0);
    let text = fs::read_to_string(&file)?;
    ensure!(text == "one\r\ntwo\r\n", "{text:?}");
    Ok(())
}

/// stdin and stdout that are no fifos, as the stock shim accepts them.
fn files_and_devices(node: &Node) -> Result<()> {
    let (input, out) = (node.disk().join("input"), node.disk().join("copied.log"));
    fs::write(&input, "from a file\n")?;
    let bundle = Bundle::create(node, "reading", &["cat"])?;
    let client = begin(node, &bundle, |request| {
        request.stdin = input.display().to_string();
        request.stdout = format!("file://{}", out.display());
    })?;
    ensure!(end(&client, "reading")? == 0);
    ensure!(fs::read_to_string(&out)? == "from a file\n");

    // More than a terminal holds without a reader.
    let bundle = with_a_terminal(node, "discarded", "head -c 1000000 /dev/zero")?;
    let client = begin(node, &bundle, |request| {
        request.terminal = true;
        request.stdin = "/dev/null".to_owned();
        request.stdout = "/dev/null".to_owned();
    })?;
    ensure!(end(&client, "discarded")? == 0);

    let bundle = with_a_terminal(node, "unread", "true")?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let request = CreateTaskRequest {
        terminal: true,
        ..bundle.request()
    };
    ensure!(
        client.create(&request).is_err(),
        "a terminal without a reader"
    );
    Ok(client.shut_down("unread")?)
}

/// containerd's API has no field for more than three; what the shim and the runtime hold open must
/// not get there.
fn no_other_descriptors(node: &Node) -> Result<()> {
    const LIST: [&str; 3] = [
        "sh",
        "-c",
        "for fd in /proc/$$/fd/*; do echo ${fd##*/}; done",
    ];
    let bundle = Bundle::create(
        node,
        "listing",
        &[
            "sh",
            "-c",
            &format!("{}; echo that is all; sleep 1000000", LIST[2]),
        ],
    )?;
    let (out, exec_out) = (
        node.disk().join("listing.log"),
        node.disk().join("listing-exec.log"),
    );
    let log = format!("file://{}", out.display());
    let client = begin(node, &bundle, |request| request.stdout.clone_from(&log))?;
    let (id, exec_id, stdout) = (
        "listing".to_owned(),
        "e".to_owned(),
        format!("file://{}", exec_out.display()),
    );
    client.exec(
        ExecProcessRequest {
            id,
            exec_id,
            stdout,
            ..Default::default()
        },
        &LIST,
    )?;
    client.start("listing", "e")?;
    ensure!(client.wait("listing", "e")? == 0);
    client.delete("listing", "e")?;
    until("the init has listed its own", || {
        Ok(fs::read_to_string(&out)?.contains("that is all"))
    })?;
    client.end("listing")?;
    client.shut_down("listing")?;
    for file in [out, exec_out] {
        let list = fs::read_to_string(&file)?;
        // the shell's descriptor of the listed folder is closed again, or has a high number
        let low: Vec<&str> = list.lines().filter(|fd| fd.len() == 1).collect();
        ensure!(
            low.starts_with(&["0", "1", "2"]) && low.len() <= 4,
            "{}: {list:?}",
            file.display()
        );
    }
    Ok(())
}
