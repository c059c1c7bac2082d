//! The journal's line matches the example in docs/journal.md.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bindguard_core::identity::{Identity, PodName};
use bindguard_core::judge::{
    Finding, NoRemedy, PathInVolume, Remedy, RepairMethod, StaleCause, Verdict,
};
use bindguard_core::kubelet::{VolumeLayout, Writer};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::Scope;
use bindguard_core::report::{BindReport, CreateLine, Outcome, Report};
use bindguard_guard::record;
use serde_json::Value;

fn bind(source: &str, verdict: Verdict) -> BindReport {
    let kind = SourceKind::from_path(source.as_ref(), &Places::default(), Scope::default());
    let finding = Finding {
        bind: None,
        source: source.into(),
        destination: None,
        kind,
        verdict,
    };
    BindReport {
        finding,
        outcome: None,
    }
}

#[test]
fn a_line_is_as_documented() {
    let page = include_str!("../../../../docs/journal.md");
    let (_, rest) = page.split_once("```json\n").unwrap();
    let documented: Value = serde_json::from_str(rest.split_once("```").unwrap().0).unwrap();

    let named = |text: &str| Some(text.to_owned());
    let source = "/var/lib/kubelet/pods/eea5c325/volume-subpaths/conf/app/0";
    let sub_path = PathInVolume {
        timestamp: None,
        path: "app.conf".into(),
    };
    let (writer, layout, method) = (Writer::Kubelet, VolumeLayout::Payload, RepairMethod::Rebind);
    let remedy = Remedy {
        volume: "/volume".into(),
        sub_path,
        writer,
        layout,
        method,
    };
    let mut bind = bind(
        source,
        Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Ok(remedy),
        },
    );
    bind.finding.destination = Some("/etc/app/app.conf".into());
    bind.outcome = Some(Outcome::Rebound { tries: 1 });
    let report = Report {
        bundle: Some("/run/containerd/io.containerd.runtime.v2.task/k8s.io/bb344d713010".into()),
        container: Identity {
            container: named("app"),
            pod: PodName {
                uid: named("eea5c325"),
                namespace: named("default"),
                name: named("web"),
            },
        },
        binds: vec![bind],
        foreign: 6,
        unproven: 0,
        problems: Vec::new(),
        inspection_us: Some(287),
        duration_us: 412,
    };
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    let mut line = CreateLine::new(&report);
    line.id = Some("bb344d713010".to_owned());
    record(&journal, line).unwrap();

    let line = fs::read_to_string(&journal).unwrap();
    assert_eq!(line.matches('\n').count(), 1);
    let mut written: Value = serde_json::from_str(&line).unwrap();
    assert!(written["time"].as_str().unwrap().ends_with('Z'));
    written["time"] = documented["time"].clone();
    assert_eq!(written, documented);
}

#[test]
fn a_bundle_whose_path_is_no_text_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    let report = Report::about_bundle(Path::new(OsStr::from_bytes(b"/run/\xff")));
    record(&journal, CreateLine::new(&report)).unwrap();
    let written: Value = serde_json::from_str(&fs::read_to_string(&journal).unwrap()).unwrap();
    assert_eq!(written["bundle"], "/run/\u{fffd}");
}

/// The longest report from a spec of sixteen MiB: the journal is still bounded, and it has all
/// findings.
#[test]
fn a_line_has_an_end() {
    let stale = || Verdict::Stale {
        cause: StaleCause::DeletedRoot,
        remedy: Err(NoRemedy::NoVolume),
    };
    let healthy = |n| bind(&format!("/{n}/{}", "x".repeat(500)), Verdict::Current);
    let mut binds: Vec<_> = (0..5_000).map(healthy).collect();
    binds.push(bind(&"/y".repeat(1 << 20), stale()));
    binds.push(bind("/found", stale()));
    let long = Some("\u{1}\u{e9}".repeat(1 << 16));
    let report = Report {
        container: Identity {
            container: long.clone(),
            pod: PodName {
                uid: long.clone(),
                namespace: long.clone(),
                name: long.clone(),
            },
        },
        binds,
        problems: vec![long.clone().unwrap(); 20],
        ..Report::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    let mut line = CreateLine::new(&report);
    line.id = long;
    record(&journal, line).unwrap();
    let line = fs::read_to_string(&journal).unwrap();
    assert!(line.len() < 1 << 20, "{} bytes", line.len());
    let written: Value = serde_json::from_str(&line).unwrap();
    let binds = written["binds"].as_array().unwrap();
    assert_eq!(binds[0]["source"], "/found");
    assert_eq!(written["omitted_binds"], 5_002 - binds.len());
}
