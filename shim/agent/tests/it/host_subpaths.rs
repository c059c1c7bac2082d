//! The agent keeps the host's subpaths current, without any shim of bindguard.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use bindguard_testing::{Pod, bind, own_namespace, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::agent::{Agent, LAST_CHECK, until};

fn config(pod: &Pod) -> String {
    format!(
        "kubelet.roots = ['{}']\n",
        pod.places().kubelet_roots[0].display()
    )
}

fn content(pod: &Pod, key: u32) -> String {
    fs::read_to_string(pod.subpath(key)).unwrap()
}

fn mounts_at(path: &Path) -> usize {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table
        .lines()
        .filter(|line| line.split(' ').nth(4) == path.to_str())
        .count()
}

#[test_if(own_namespace)]
fn an_update_is_followed_and_counted() {
    let pod = Pod::with_keys(3);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &config(&pod));
    for number in 1..=20 {
        pod.update(number);
        for key in 0..3 {
            until("the subpath is current", || {
                content(&pod, key) == number.to_string()
            });
        }
    }
    assert_eq!([0, 1, 2].map(|key| mounts_at(&pod.subpath(key))), [1, 1, 1]);
    // Updates that arrive together count once.
    let updates = agent.figure("bindguard_agent_volume_updates_total");
    assert!((10.0..=20.0).contains(&updates), "{updates}");
    // A re-bind that an update interrupts goes on with the newer file, and is counted once.
    until("re-binds are counted", || {
        agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}") >= 20.0
    });
    assert_eq!(agent.figure("bindguard_agent_watch_errors_total"), 0.0);
    assert_eq!(agent.terminate(), Some(0));
}

/// Each re-bind is a line of the journal. The agent reads the same journal, and counts the re-bind
/// once.
#[test_if(own_namespace)]
fn a_rebind_is_journaled_once_and_counted_once() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &config(&pod));
    let lines = || fs::read_to_string(folder.path().join("journal.jsonl")).unwrap_or_default();
    pod.update(1);
    until("the re-bind is journaled", || lines().contains("rebound"));
    // The checks a moment after the update find nothing new.
    agent.until_idle(LAST_CHECK);
    let text = lines();
    assert_eq!(text.lines().count(), 1, "{text}");
    for part in [
        r#"{"version":2,"kind":"rebind""#,
        r#""by":"agent""#,
        r#""uid":"uid-1""#,
        r#""volume":"conf""#,
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    for _ in 0..2 {
        assert_eq!(
            agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}"),
            1.0
        );
    }
    assert_eq!(
        agent.figure("bindguard_journal_unread_lines_total{reason=\"newer\"}"),
        0.0
    );
}

/// A survey finds the same fault again: one line is enough.
#[test_if(own_namespace)]
fn a_fault_that_stays_is_journaled_once() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(
        folder.path(),
        &format!(
            "agent.survey-seconds = 1\n{}checks.stale-subpaths = 'report'\n",
            config(&pod)
        ),
    );
    pod.update(1);
    let lines = || fs::read_to_string(folder.path().join("journal.jsonl")).unwrap_or_default();
    until("the fault is journaled", || lines().contains("planned"));
    // A survey in the middle of the update finds an older payload, the next survey a deleted file.
    until_surveyed(&agent, 2.0);
    let text = lines();
    let is_planned = |line: &str| line.contains("planned");
    assert!(
        text.lines().count() <= 2 && text.lines().all(is_planned),
        "{text}"
    );
    until_surveyed(&agent, 3.0);
    assert_eq!(lines(), text);
}

/// The agent was not there, or was killed: the survey at its start catches up.
#[test_if(own_namespace)]
fn updates_that_were_missed_are_caught_up() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    for number in 1..=5 {
        pod.update(number);
        // Dropped, which kills it.
        let _agent = Agent::start(folder.path(), &config(&pod));
        until("the subpath is current", || {
            content(&pod, 0) == number.to_string()
        });
        assert_eq!(mounts_at(&pod.subpath(0)), 1);
    }
}

#[test_if(own_namespace)]
fn killed_while_it_works_leaves_whole_content_and_one_mount() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    for number in 1..=30 {
        let agent = Agent::start(folder.path(), &config(&pod));
        pod.update(number);
        thread::sleep(Duration::from_micros(number * 100));
        drop(agent);
        assert!(!content(&pod, 0).is_empty());
    }
    let _agent = Agent::start(folder.path(), &config(&pod));
    until("the subpath is current", || content(&pod, 0) == "30");
    until("one mount is left", || mounts_at(&pod.subpath(0)) == 1);
}

#[test_if(own_namespace)]
fn report_and_off_change_nothing() {
    for mode in ["report", "off"] {
        let pod = Pod::with_keys(1);
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::start(
            folder.path(),
            &format!(
                "agent.survey-seconds = 1\n{}checks.stale-subpaths = '{mode}'\n",
                config(&pod)
            ),
        );
        pod.update(1);
        let reported =
            || agent.figure("bindguard_subpath_rebinds_total{outcome=\"reported\"}") > 0.0;
        if mode == "report" {
            until("it is reported", reported);
        } else {
            until_surveyed(&agent, 2.0);
            assert!(!reported());
        }
        assert_eq!(
            (content(&pod, 0).as_str(), mounts_at(&pod.subpath(0))),
            ("0", 1),
            "{mode}"
        );
    }
}

/// A pod that comes later, with a secret: its tmpfs hides a watch that is set too early.
#[test_if(own_namespace)]
fn a_new_pod_with_a_tmpfs_volume_is_followed() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let _agent = Agent::start(folder.path(), &config(&pod));
    for round in 0..10 {
        let uid = format!("uid-late-{round}");
        let directory = pod.directory().with_file_name(&uid);
        let volume = directory.join("volumes/kubernetes.io~secret/token");
        let subpath = directory.join("volume-subpaths/token/app/0");
        fs::create_dir_all(&volume).unwrap();
        mount(
            Some("tmpfs"),
            &volume,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
        let write = |number: u32| {
            let timestamp = format!("..2026_11_21_05_10_00.{number}");
            fs::create_dir(volume.join(&timestamp)).unwrap();
            fs::write(volume.join(&timestamp).join("key"), number.to_string()).unwrap();
            let old = fs::read_link(volume.join("..data"));
            std::os::unix::fs::symlink(&timestamp, volume.join("..data_tmp")).unwrap();
            fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
            if let Ok(old) = old {
                let _ = fs::remove_dir_all(volume.join(old));
            }
        };
        write(1);
        fs::create_dir_all(subpath.parent().unwrap()).unwrap();
        fs::write(&subpath, "").unwrap();
        bind(&volume.join("..data/key"), &subpath);
        // In the first rounds at once: the agent may not have set its watch.
        thread::sleep(Duration::from_millis(round));
        write(2);
        until("the subpath is current", || {
            fs::read_to_string(&subpath).unwrap() == "2"
        });
        // A plain umount, as the kubelet's: it fails while a check has the mount open, and the
        // kubelet tries again.
        until("the subpath is unmounted", || {
            umount2(&subpath, MntFlags::empty()).is_ok()
        });
        until("the volume is unmounted", || {
            umount2(&volume, MntFlags::empty()).is_ok()
        });
        fs::remove_dir_all(&directory).expect("nothing of the agent keeps the pod's folder");
    }
}

#[test_if(own_namespace)]
fn it_serves_health_figures_and_the_report_and_nothing_else() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(
        folder.path(),
        &format!("{}checks.stale-subpaths = 'report'\n", config(&pod)),
    );
    pod.update(1);
    let state: serde_json::Value =
        serde_json::from_str(agent.get("/v1/status").split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(
        (&state["ready"], &state["stale_subpaths"], &state["nri"]),
        (&true.into(), &"report".into(), &"off".into())
    );
    assert_eq!(state["pid"], agent.pid());
    for (path, status) in [
        ("/healthz", 200),
        ("/readyz", 200),
        ("/metrics", 200),
        ("/", 404),
        ("/v1", 404),
    ] {
        assert!(
            agent.get(path).starts_with(&format!("HTTP/1.1 {status}")),
            "{path}: {}",
            agent.get(path)
        );
    }
    let post = agent.request(
        "POST /v1/report HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    );
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    let report = agent.get("/v1/report");
    assert!(
        report.contains("application/json") && report.contains("volume-subpaths/conf/app/0"),
        "{report}"
    );
    assert!(agent.get("/metrics").trim_end().ends_with("# EOF"));
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(folder.path().join("agent.sock"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    agent.terminate();
    assert!(
        folder.path().join("agent.sock").symlink_metadata().is_err(),
        "an agent that ended in order leaves no socket"
    );
}

/// An agent without work does not wake up.
#[test_if(own_namespace)]
fn it_sleeps_while_nothing_happens() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &config(&pod));
    // After the checks a moment after the start, and the return of the memory that they used.
    agent.until_idle(Duration::from_secs(3));
}

/// Waits for this number of further surveys.
fn until_surveyed(agent: &Agent, times: f64) {
    let surveys = || agent.figure("bindguard_agent_surveys_total");
    let before = surveys();
    until("the agent surveys the node", || surveys() >= before + times);
}
