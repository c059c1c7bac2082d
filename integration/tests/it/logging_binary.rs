//! A container that logs into a program (`binary://`) or into a file (`file://`), as nerdctl's and
//! ECS' do.
//!
//! After the answer of the delete every line is written and the program has ended. The test also
//! runs with the stock shim, for which clients are written.

use bindguard_integration::prelude::*;
use std::os::unix::fs::PermissionsExt;

const RUNTIMES: [Runtime; 2] = [Runtime::Stock, Runtime::Bindguard];
/// Writes its arguments and its input, and reports on descriptor 5 last, so that the container
/// starts afterwards. The logger still works for a moment after the end of its input: a SIGTERM at
/// this time would end the logger before it writes the last file.
const LOGGER: &str = "echo \"$CONTAINER_NAMESPACE/$CONTAINER_ID: $*\" > $0.started\n\
                      cat <&3 >> $0.out & cat <&4 >> $0.err & sleep 0.2\necho ready >&5; exec 5>&-\n\
                      wait\nsleep 0.3\n: > $0.ended\n";
/// Go's shim sends SIGTERM at once.
const IGNORE_TERM: &str = "trap '' TERM\n";

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        RUNTIMES
            .into_iter()
            .enumerate()
            .try_for_each(|(number, runtime)| {
                let folder = node.disk().join(format!("logs-{number}"));
                fs::create_dir(&folder)?;
                every_line(node, runtime, &folder)?;
                no_such_program(node, runtime)
            })?;
        a_file(node, &node.disk().join("logs"))
    });
}

on_newest_and_older!(story);

#[test]
fn program_that_reads_nothing_gets_sigterm() {
    Setup::on(Generation::NEWEST).story(|node| {
        let text = "#!/bin/sh\ntrap ': > $0.terminated; exit' TERM\nexec 5>&-\nwhile :; do sleep 0.1; done\n";
        let logger = program(node.disk(), "endless", text)?;
        logs(node, Runtime::Bindguard, "endless", &format!("binary://{}", logger.display()), "exit 0")?;
        node.ctr().remove("endless")?;
        read(&logger.with_file_name("endless.terminated")).context("it got no SIGTERM")?;
        ensure!(!node.processes()?.iter().any(|name| name.starts_with("endless")), "the program still runs");
        Ok(())
    });
}

#[test]
fn program_that_ignores_sigterm_is_killed() {
    Setup::on(Generation::NEWEST).story(|node| {
        let text = "#!/bin/sh\ntrap '' TERM\nexec 5>&-\nexec sleep 1000000\n";
        let logger = program(node.disk(), "stubborn", text)?;
        logs(
            node,
            Runtime::Bindguard,
            "stubborn",
            &format!("binary://{}", logger.display()),
            "exit 0",
        )?;
        node.ctr().remove("stubborn")?;
        ensure!(
            !node
                .processes()?
                .iter()
                .any(|name| name.starts_with("sleep")),
            "the program still runs"
        );
        Ok(())
    });
}

fn every_line(node: &Node, runtime: Runtime, folder: &Path) -> Result<()> {
    let first_line = if runtime == Runtime::Stock {
        IGNORE_TERM
    } else {
        ""
    };
    let logger = program(
        folder,
        "logger",
        &format!("#!/bin/sh\n{first_line}{LOGGER}"),
    )?;
    let uri = format!("binary://{}?tag=a%20b", logger.display());
    let script = "for n in 1 2 3 4 5 6 7 8 9; do echo out $n; echo err $n >&2; done";
    logs(node, runtime, "chatty", &uri, script)?;
    node.ctr().wait_for_status("chatty", "STOPPED")?;
    node.ctr().remove("chatty")?;
    let lines = |word: &str| (1..=9).map(|n| format!("{word} {n}\n")).collect::<String>();
    let of = |end: &str| read(&logger.with_file_name(format!("logger.{end}")));
    ensure!(
        of("started")? == format!("{}/chatty: tag a b\n", node.name()),
        "{runtime:?}: {:?}",
        of("started")?
    );
    ensure!(
        of("out")? == lines("out") && of("err")? == lines("err"),
        "{runtime:?}: {:?} {:?}",
        of("out")?,
        of("err")?
    );
    of("ended")
        .with_context(|| format!("{runtime:?}: the program was killed"))
        .map(drop)
}

fn no_such_program(node: &Node, runtime: Runtime) -> Result<()> {
    let error = run(command(
        node,
        runtime,
        "mute",
        "binary:///no/such/logger",
        "exit 0",
    ))?
    .failure()?;
    ensure!(
        error.contains("/no/such/logger") && error.to_lowercase().contains("no such file"),
        "{runtime:?}: {error}"
    );
    let _ = node.ctr().forget("mute");
    Ok(())
}

/// Not run with the stock shim: the stock shim of 1.7 sometimes closes the file during its copy and
/// loses a line.
fn a_file(node: &Node, folder: &Path) -> Result<()> {
    let file = folder.join("new/folder/web.log");
    for _ in 0..2 {
        logs(
            node,
            Runtime::Bindguard,
            "filed",
            &format!("file://{}", file.display()),
            "echo one; echo two >&2",
        )?;
        node.ctr().wait_for_status("filed", "STOPPED")?;
        node.ctr().remove("filed")?;
    }
    let mut lines: Vec<String> = read(&file)?.lines().map(str::to_owned).collect();
    lines.sort();
    ensure!(lines == ["one", "one", "two", "two"], "{lines:?}");
    ensure!(fs::metadata(&file)?.permissions().mode() & 0o777 == 0o644);
    Ok(())
}

fn logs(node: &Node, runtime: Runtime, id: &str, uri: &str, script: &str) -> Result<()> {
    run(command(node, runtime, id, uri, script))?
        .success()
        .map(drop)
}

fn command(node: &Node, runtime: Runtime, id: &str, uri: &str, script: &str) -> Command {
    node.ctr()
        .container(id)
        .runtime(runtime)
        .runs(&["sh", "-c", script])
        .command(&["--detach", "--log-uri", uri])
}

fn program(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    write_program(&path, text)?;
    Ok(path)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}
