//! `selftest` finds nothing on a good node, and leaves nothing on it, also when it is killed. A
//! runtime that does not do what the spec says fails its point.

use bindguard_integration::prelude::*;
use std::thread::sleep;

use nix::libc;

const SCENES: [&str; 7] = [
    "kernel",
    "mount-table",
    "re-bind",
    "live-refresh",
    "live-refresh-in-user-namespace",
    "killed-refresh",
    "propagation",
];

/// The names and results of the points, and the last point's text.
fn points(json: &str) -> Result<(Vec<(String, String)>, String)> {
    let report: Value = serde_json::from_str(json).with_context(|| json.to_owned())?;
    let points = report["points"].as_array().context("no points")?;
    let word = |point: &Value, key: &str| point[key].as_str().unwrap_or_default().to_owned();
    let mut found = Vec::new();
    for point in points {
        found.push((word(point, "name"), word(point, "status")));
    }
    let last = points.last().context("no point")?;
    Ok((found, word(last, "message")))
}

/// Possible traces of the self-test: mounts, files in /run, cgroups.
fn traces() -> Result<Vec<String>> {
    let mut traces = vec![fs::read_to_string("/proc/self/mountinfo")?];
    for folder in ["/run", "/sys/fs/cgroup"] {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            // The cgroup of a container has the name of the container.
            if folder == "/run" || path.join("selftest").exists() || path.ends_with("selftest") {
                traces.push(path.display().to_string());
            }
        }
    }
    traces.sort();
    Ok(traces)
}

fn on_a_good_node(node: &Node, runtime: &str) -> Result<()> {
    let before = traces()?;
    let selftest = node.bindguard(["selftest", "--json"])?;
    ensure!(traces()? == before, "something is left");
    let code = selftest.code();
    let (points, last) = points(&selftest.stdout)?;
    let expected: Vec<_> = SCENES
        .iter()
        .chain(&["oci-runtime"])
        .map(|name| (name.to_string(), "ok".to_owned()))
        .collect();
    ensure!(points == expected && code == 0, "{selftest:?}");
    ensure!(last.starts_with(runtime), "{last}");
    let text = node.bindguard(["selftest"])?.success()?;
    ensure!(text.ends_with("8 points, 0 not ok\n"), "{text}");
    Ok(())
}

#[test]
fn a_good_node_with_runc() {
    Setup::on(Generation::NEWEST)
        .bare()
        .story(|node| on_a_good_node(node, "runc version "));
}

#[test]
fn a_good_node_with_crun() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Crun(Generation::NEWEST))
        .bare()
        .story(|node| on_a_good_node(node, "crun version "));
}

/// Linux before 5.14: the scenes of a refresh fail, and their readers end without a message.
#[test]
fn a_kernel_without_mount_setattr() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let mut command = node.command(env!("CARGO_BIN_EXE_denied"))?;
        command.arg(format!("{}={}", libc::SYS_mount_setattr, libc::ENOSYS));
        command
            .arg(node.under_test().join("bindguard"))
            .args(["selftest", "--json"]);
        let selftest = run(command)?;
        let (points, _) = points(&selftest.stdout)?;
        let live_refresh = ("live-refresh".to_owned(), "failed".to_owned());
        ensure!(points.contains(&live_refresh), "{selftest:?}");
        ensure!(!selftest.stderr.contains("panicked"), "{selftest:?}");
        Ok(())
    });
}

#[test]
fn killed_at_any_time() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let before = traces()?;
        for tenths in 0..12 {
            let mut command = node.command(node.under_test().join("bindguard"))?;
            command.arg("selftest").stdout(Stdio::null());
            let mut selftest = command.spawn()?;
            sleep(Duration::from_millis(tenths * 100));
            selftest.kill()?;
            selftest.wait()?;
            until("the end of the self-test's processes", || {
                let names = node.processes()?;
                Ok(!names.iter().any(|name| name.starts_with("exe")))
            })?;
            ensure!(traces()? == before, "something is left after {tenths}00 ms");
        }
        Ok(())
    });
}

/// The runtime leaves the bind out; another cannot create any container.
#[test]
fn runtimes_that_fail() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let folder = node.disk();
        let lying = folder.join("lying");
        let runc = node.programs().join("runc");
        let elsewhere = r#"s|"destination":"/etc/app/key"|"destination":"/etc/other"|"#;
        write_program(
            &lying,
            &format!(
                "#!/bin/sh\nfor word; do case $word in */bundle) sed -i '{elsewhere}' $word/config.json ;; esac; done\n\
                 exec {} \"$@\"\n",
                runc.display()
            ),
        )?;
        let failing = folder.join("failing");
        write_program(
            &failing,
            "#!/bin/sh\necho \"$*\" | grep -q version && exec echo other 1.0\necho no cgroup >&2\nexit 1\n",
        )?;
        for (program, status, code, text) in [
            (&lying, "failed", 1, "do not show what their spec says"),
            (&failing, "unknown", 2, "other 1.0 create: exit status: 1: no cgroup"),
        ] {
            let mut command = node.command(node.under_test().join("bindguard"))?;
            command.args(["selftest", "--json", "--runtime"]).arg(program);
            let selftest = run(command)?;
            let (points, last) = points(&selftest.stdout)?;
            let (_, found) = points.last().context("no point")?;
            ensure!(found == status && selftest.code() == code, "{selftest:?}");
            ensure!(last.contains(text), "{last}");
        }
        let absent = node.bindguard(["selftest", "--runtime", "/absent/runc"])?;
        ensure!(absent.code() == 2, "{absent:?}");
        ensure!(absent.stderr.contains("run /absent/runc: No such file or directory"), "{absent:?}");
        Ok(())
    });
}
