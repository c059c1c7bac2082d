//! kubediag's processors over HTTP, with the statuses that kubediag's executor expects, and a
//! recoverer that touches nothing but stale subpaths.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use bindguard_testing::{Pod, bind, own_namespace, test_if};
use nix::mount::{MntFlags, umount2};
use serde_json::{Value, json};

use crate::agent::{Agent, until};

const PROCESSORS: [&str; 4] = [
    "podDetailCollector",
    "mountInfoCollector",
    "subpathRemountDiagnoser",
    "subpathRemountRecover",
];
const TARGET: &str = "diagnoser.kubernetes.subpath_remount.original_destination_path";

/// The watcher only reports here: it would repair before kubediag can.
fn agent(pod: &Pod, folder: &Path, kubediag: &str) -> Agent {
    let root = pod.places().kubelet_roots[0].display().to_string();
    Agent::start(
        folder,
        &format!("{kubediag}kubelet.roots = ['{root}']\nchecks.stale-subpaths = 'report'\n"),
    )
}

/// Enabled, at an address for this test alone.
fn enabled() -> String {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    format!("agent.kubediag = {{ enabled = true, listen = '127.0.0.1:{port}' }}\n")
}

fn call(agent: &Agent, method: &str, processor: &str, body: &str) -> (u16, String, String) {
    let length = body.len();
    let answer = agent.request(&format!(
        "{method} /processor/{processor} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    ));
    let (head, text) = answer.split_once("\r\n\r\n").expect("an answer");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_lowercase(), text.to_owned())
}

fn recover(agent: &Agent, target: &str) -> (u16, String) {
    let (status, _, text) = call(
        agent,
        "POST",
        "subpathRemountRecover",
        &json!({ TARGET: target }).to_string(),
    );
    (status, text)
}

#[test_if(own_namespace)]
fn a_disabled_processor_answers_422_to_everything() {
    let (pod, folder) = (Pod::with_keys(1), tempfile::tempdir().unwrap());
    let agent = agent(&pod, folder.path(), "");
    pod.update(1);
    for processor in PROCESSORS {
        for method in ["GET", "POST", "PUT"] {
            let (status, head, text) = call(&agent, method, processor, "");
            assert_eq!(status, 422, "{method} {processor}");
            assert!(
                head.contains("content-type: text/plain") && text.contains("is disabled"),
                "{head} {text}"
            );
        }
    }
    assert_eq!(
        call(&agent, "POST", "nodeCordon", "").0,
        404,
        "kubediag's other processors are not served"
    );
    let stale = pod.subpath(0).display().to_string();
    assert_eq!(recover(&agent, &stale).0, 422);
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "0");
}

#[test_if(own_namespace)]
fn other_methods_are_405_and_bad_requests_500() {
    let (pod, folder) = (Pod::with_keys(1), tempfile::tempdir().unwrap());
    let agent = agent(&pod, folder.path(), &enabled());
    for processor in PROCESSORS {
        for method in ["GET", "PUT", "DELETE"] {
            let (status, head, text) = call(&agent, method, processor, "");
            assert_eq!(
                (status, text.trim_end()),
                (405, format!("method {method} is not supported").as_str())
            );
            assert!(head.contains("content-type: text/plain"), "{head}");
        }
    }
    // kubediag's own processors panic on most of these.
    for processor in [
        "podDetailCollector",
        "subpathRemountDiagnoser",
        "subpathRemountRecover",
    ] {
        for body in [
            "",
            "no",
            "[]",
            "{}",
            r#"{"pod.name":7}"#,
            r#"{"pod.name":"a/b","pod.namespace":"default"}"#,
        ] {
            let (status, head, text) = call(&agent, "POST", processor, body);
            assert!(
                status == 500 && head.contains("content-type: text/plain"),
                "{processor} {body}: {head} {text}"
            );
        }
    }
    let (_, _, text) = call(
        &agent,
        "POST",
        "podDetailCollector",
        r#"{"pod.name":"web","pod.namespace":"default"}"#,
    );
    assert!(text.contains("no credentials for the API server"), "{text}");
}

#[test_if(own_namespace)]
fn the_chain_repairs_a_stale_subpath_by_a_rebind() {
    let (pod, folder) = (Pod::with_keys(2), tempfile::tempdir().unwrap());
    let agent = agent(&pod, folder.path(), &enabled());
    pod.update(1);
    let subpath = pod.subpath(1).display().to_string();
    let (status, head, text) = call(&agent, "POST", "mountInfoCollector", "{}");
    assert!(
        status == 200 && head.contains("content-type: application/json"),
        "{head}"
    );
    let mut results: Value = serde_json::from_str(&text).unwrap();
    let table = results["collector.system.mountinfo"].as_str().unwrap();
    assert!(
        table.contains(&format!(" {subpath} ")) && table.ends_with('\n'),
        "{table}"
    );

    let error = format!(
        "error mounting \"{subpath}\" to rootfs at \"/etc/app/1\": no such file or directory: unknown"
    );
    let kube_pod = json!({
        "spec": {
            "containers": [{"name": "app", "volumeMounts": [{"name": "conf", "subPath": "1", "mountPath": "/etc/app/1"}]}],
            "volumes": [{"name": "conf", "configMap": {"name": "conf"}}],
        },
        "status": {"containerStatuses": [{"ready": false, "state": {"waiting": {"message": error}}}]},
    });
    results["collector.kubernetes.pod.detail"] = kube_pod.to_string().into();
    let (status, _, text) = call(
        &agent,
        "POST",
        "subpathRemountDiagnoser",
        &results.to_string(),
    );
    assert_eq!(status, 200, "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found[TARGET], subpath.as_str());
    let source = found["diagnoser.kubernetes.subpath_remount.original_source_path"]
        .as_str()
        .unwrap();
    assert!(source.ends_with("/1//deleted"), "{source}");

    assert_eq!(fs::read_to_string(&subpath).unwrap(), "0");
    let (status, text) = recover(&agent, &subpath);
    assert_eq!(status, 200, "{text}");
    let result: Value = serde_json::from_str(&text).unwrap();
    let expected = format!("Succeesfully umount {subpath} on host");
    assert_eq!(
        result,
        json!({ "recover.kubernetes.subpath_remount.result": expected })
    );
    assert_eq!(
        fs::read_to_string(&subpath).unwrap(),
        "1",
        "kubediag only unmounts"
    );
    assert_eq!(
        fs::read_to_string(pod.subpath(0)).unwrap(),
        "0",
        "the other one was not named"
    );
    let journal = || fs::read_to_string(folder.path().join("journal.jsonl")).unwrap_or_default();
    until("the repair is journaled", || {
        journal().contains(r#""rebound""#)
    });

    let (status, text) = recover(&agent, &subpath);
    assert!(
        status == 500 && text.contains("is current"),
        "a second time there is nothing to repair: {text}"
    );
}

/// Each path is an alias of the stale subpath, or is no stale subpath.
#[test_if(own_namespace)]
fn the_recoverer_refuses_every_other_path() {
    let (pod, folder) = (Pod::with_keys(2), tempfile::tempdir().unwrap());
    let agent = agent(&pod, folder.path(), &enabled());
    pod.update(1);
    let stale = pod.subpath(0);
    let link = folder.path().join("link");
    symlink(&stale, &link).unwrap();
    let pods = pod.directory().parent().unwrap().to_owned();
    let other_pod = pods.join("uid-link");
    symlink(pod.directory(), &other_pod).unwrap();
    let mount_point = folder.path().join("mount");
    fs::create_dir(&mount_point).unwrap();
    bind(folder.path(), &mount_point);
    let text = |path: &Path| path.display().to_string();
    let stale_text = text(&stale);
    for target in [
        text(&link),
        text(&other_pod.join("volume-subpaths/conf/app/0")),
        text(&mount_point),
        text(&pod.volume()),
        text(&pods),
        stale_text.replace("/app/0", "/app/../app/0"),
        stale_text.replace("/app/0", "//app/0"),
        stale_text.replace("/app/0", "/./app/0"),
        stale_text.replace("/app/0", "/app/00"),
        stale_text.replace("/app/0", "/app/7"),
        format!("{stale_text}/"),
        stale_text.trim_start_matches('/').to_owned(),
        "/".to_owned(),
        "/proc".to_owned(),
    ] {
        let (status, answer) = recover(&agent, &target);
        assert_eq!(status, 500, "{target}: {answer}");
    }
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    assert!(
        mounts.contains(&format!(" {} ", mount_point.display())),
        "another mount was unmounted"
    );
    assert_eq!(
        fs::read_to_string(&stale).unwrap(),
        "0",
        "something was repaired"
    );
    assert_eq!(recover(&agent, &stale_text).0, 200);
    umount2(&mount_point, MntFlags::MNT_DETACH).unwrap();
}
