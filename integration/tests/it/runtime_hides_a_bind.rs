//! A runtime that mounts each source, but where the container cannot see the source, and a spec
//! that a program changes below the guard. `proof = "refuse"` refuses the wrong mounts before the
//! container's program runs; binds that an honest wrapper adds are only counted.

use bindguard_integration::ctr::{Container, Ctr};
use bindguard_integration::journal;
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};

/// Each of bindguard's two ways to a proof.
const RUNTIMES: [Runtime; 2] = [Runtime::Bindguard, Runtime::Wrapper];

/// The runtime mounts the bind at another place without a link, a tmpfs over the bind, or a tmpfs
/// over the folder above; or leaves the bind out, and mounts the same source at `/second`.
const LIES: [(&str, &str); 4] = [
    (
        "elsewhere",
        r#"s|"destination":"/top/data"|"destination":"/elsewhere"|"#,
    ),
    (
        "covered",
        r#"s|{"destination":"/top/data"[^}]*}|&,{"destination":"/top/data","type":"tmpfs","source":"tmpfs"}|"#,
    ),
    (
        "covered-above",
        r#"s|{"destination":"/top/data"[^}]*}|&,{"destination":"/top","type":"tmpfs","source":"tmpfs"}|"#,
    ),
    ("left-out", r#"s|,{"destination":"/top/data"[^}]*}||"#),
];

/// The spec of the bundle says what the runtime mounts: another source, or no bind at all.
const CHANGES: [(&str, &str); 2] = [
    ("other-source", "s|/run/right|/run/left|"),
    ("dropped", r#"s|,{"destination":"/top/data"[^}]*}||"#),
];

const ADDED: &str = r#"s|{"destination":"/top/data"|{"destination":"/added","type":"bind","source":"/run/left","options":["rbind","ro","rprivate"]},&|"#;

fn setup() -> Setup {
    Setup::on(Generation::NEWEST)
        .faulty_runtime()
        .policy("[guard]\ndeadline-ms = 20000\n[checks]\nproof = \"refuse\"\n")
}

#[test]
fn mounts_that_the_container_cannot_see_are_refused() {
    setup().story(|node| {
        folders()?;
        let mut started = Vec::new();
        for runtime in RUNTIMES {
            for (name, edit) in LIES {
                let second = Bind::new("/run/right", "/second");
                let binds = [second].into_iter().filter(|_| name == "left-out");
                let fault = Fault::ReadsAnotherSpec(edit);
                started.extend(starts(node, runtime, name, fault, binds.collect())?);
            }
        }
        ensure!(started.is_empty(), "these programs ran: {started:?}");
        Ok(())
    });
}

#[test]
fn a_spec_that_changed_below_the_guard_is_refused() {
    setup().story(|node| {
        folders()?;
        let mut started = Vec::new();
        for runtime in RUNTIMES {
            for (name, edit) in CHANGES {
                let fault = Fault::RewritesSpec(edit);
                started.extend(starts(node, runtime, name, fault, Vec::new())?);
            }
        }
        ensure!(started.is_empty(), "these programs ran: {started:?}");
        Ok(())
    });
}

/// As nvidia-container-runtime does. The binds that the guard recorded are unchanged.
#[test]
fn a_bind_that_a_wrapper_adds_is_counted() {
    setup().story(|node| {
        folders()?;
        for runtime in RUNTIMES {
            let id = format!("added-{runtime:?}").to_lowercase();
            ObedientRuntime::of(&node.programs()).next("create", Fault::RewritesSpec(ADDED))?;
            let ctr = node.ctr();
            container(&ctr, runtime, &id).start()?.success()?;
            let table = format!("/proc/{}/mountinfo", ctr.pid(&id)?);
            let table = fs::read_to_string(table).context("read the mount table")?;
            ensure!(table.contains(" /added "), "not added: {table}");
            let lines = lines_with_a_pid(&id)?;
            ctr.remove(&id)?;
            ensure!(lines.len() == 1, "{id}: {lines:?}");
            let line = &lines[0];
            ensure!(line["unproven"] == 1 && line["refused"].is_null(), "{line}");
            ensure!(line["binds"].as_array().is_none_or(Vec::is_empty), "{line}");
        }
        Ok(())
    });
}

/// Starts a container under a runtime with this fault. The id if its program ran.
fn starts(
    node: &Node,
    runtime: Runtime,
    name: &str,
    fault: Fault,
    binds: Vec<Bind>,
) -> Result<Option<String>> {
    let id = format!("{name}-{runtime:?}").to_lowercase();
    ObedientRuntime::of(&node.programs()).next("create", fault)?;
    let ctr = node.ctr();
    let mut container = container(&ctr, runtime, &id);
    for bind in binds {
        container = container.mount(bind);
    }
    let started = container.start()?;
    if started.success().is_ok() {
        let shown = ctr.read(&id, "/top/data/right");
        ensure!(shown.is_err(), "{name}: the edit of the spec had no effect");
        ctr.remove(&id)?;
        return Ok(Some(id));
    }
    let lines = lines_with_a_pid(&id)?;
    ensure!(lines.len() == 1, "{id}: {lines:?}");
    let bind = &lines[0]["binds"][0];
    ensure!(
        lines[0]["refused"].is_string() && bind["destination"] == "/top/data",
        "{lines:?}"
    );
    Ok(None)
}

fn container<'c>(ctr: &'c Ctr, runtime: Runtime, id: &str) -> Container<'c> {
    let bind = Bind::new("/run/right", "/top/data").options(&["rbind", "ro", "rprivate"]);
    ctr.container(id).runtime(runtime).mount(bind)
}

fn folders() -> Result<()> {
    for folder in ["/run/right", "/run/left"] {
        fs::create_dir_all(folder).with_context(|| format!("create {folder}"))?;
    }
    fs::write("/run/right/right", "").context("write a file")
}

/// The lines about the container after its create.
fn lines_with_a_pid(id: &str) -> Result<Vec<Value>> {
    let mut lines = journal::lines(JOURNAL)?;
    lines.retain(|line| line["id"] == id && line["pid"].is_u64());
    Ok(lines)
}
