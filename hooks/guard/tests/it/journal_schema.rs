//! docs/journal.schema.json describes exactly what is written, no less and no more.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::identity::{Identity, PodName};
use bindguard_core::judge::{Finding, Lack, NoRemedy, Pinning, StaleCause, Unmounted, Verdict};
use bindguard_core::places::{KindName, Places, SourceKind};
use bindguard_core::policy::Scope;
use bindguard_core::proof::Difference;
use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::{Notify, NotifySignal, ProgramName};
use bindguard_core::report::{
    Actor, AttachMethod, BindReport, CreateLine, MountResult, Notification, Outcome, PlannedAction,
    RebindLine, RefreshLine, RefreshedMount, ReleaseLine, ReleaseResult, ReleasedCopy, Report,
};
use bindguard_guard::{record, record_rebind, record_refresh, record_release, record_unchecked};
use serde_json::{Value, json};

use crate::json_schema::Schema;

const POD: &str = "/var/lib/kubelet/pods/eea5c325";

fn schema() -> Schema {
    Schema(serde_json::from_str(include_str!("../../../../docs/journal.schema.json")).unwrap())
}

/// The line that the journal gets.
fn line_by(write: impl FnOnce(&Path) -> Result<(), bindguard_sys::Failure>) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    write(&journal).unwrap();
    serde_json::from_str(&fs::read_to_string(&journal).unwrap()).unwrap()
}

fn line_of(line: CreateLine<&Report>) -> Value {
    line_by(|journal| record(journal, line))
}

fn bind(source: &str, verdict: Verdict, outcome: Option<Outcome>) -> BindReport {
    let source = PathBuf::from(source);
    let kind = SourceKind::from_path(&source, &Places::default(), Scope::default());
    let finding = Finding {
        bind: Some(0),
        source,
        destination: Some("/in/container".into()),
        kind,
        verdict,
    };
    BindReport { finding, outcome }
}

/// A bind of each kind and verdict that can be in a line.
fn of_every_verdict() -> Vec<BindReport> {
    let subpath = format!("{POD}/volume-subpaths/conf/app/0");
    let stale = |outcome| {
        let remedy = Err(NoRemedy::NoVolume);
        bind(
            &subpath,
            Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy,
            },
            outcome,
        )
    };
    let orphaned = Verdict::Orphaned {
        cause: StaleCause::DeletedRoot,
        lacks: Lack::Payload,
        remake: None,
    };
    let pinning = |private: Option<&str>| {
        Verdict::Pinning(Pinning {
            bind: true,
            rootfs: true,
            private_mount: private.map(PathBuf::from),
            kept: None,
        })
    };
    let dead = || Verdict::Dead("its daemon is gone".to_owned());
    vec![
        bind(&subpath, Verdict::Current, None),
        stale(Some(Outcome::Rebound { tries: 2 })),
        stale(Some(Outcome::AlreadyCurrent)),
        stale(Some(Outcome::PointedAtVolume {
            source: "/volume/key".into(),
        })),
        stale(Some(Outcome::Failed {
            error: "move_mount: EINVAL".to_owned(),
        })),
        stale(Some(Outcome::Detached)),
        stale(Some(Outcome::Planned {
            action: PlannedAction::Rebind,
        })),
        bind(&subpath, orphaned, None),
        bind(
            &subpath,
            Verdict::Unmounted(Unmounted::Subpath),
            Some(Outcome::Refused),
        ),
        bind(
            &format!("{POD}/volumes/kubernetes.io~nfs/share"),
            dead(),
            Some(Outcome::Refused),
        ),
        bind(
            &format!("{POD}/volumes/kubernetes.io~configmap/conf/app.conf"),
            Verdict::Current,
            None,
        ),
        bind("/srv/share", dead(), None),
        bind("/", pinning(None), Some(Outcome::MadeRslave)),
        bind(
            "/",
            pinning(Some("/")),
            Some(Outcome::needs_shared(Path::new("/"))),
        ),
        bind("/", Verdict::Wrong(Difference::WithoutMaster), None),
        bind("/srv/data", Verdict::Wrong(Difference::NotMounted), None),
        bind("/", Verdict::Unknown("it did not answer".to_owned()), None),
    ]
}

/// Every field is named: a new field does not compile until it is added here.
fn full() -> Report {
    let named = |text: &str| Some(text.to_owned());
    Report {
        bundle: Some("/run/bundle".into()),
        container: Identity {
            container: named("app"),
            pod: PodName {
                uid: named("eea5c325"),
                namespace: named("default"),
                name: named("web"),
            },
        },
        binds: of_every_verdict(),
        foreign: 6,
        unproven: 2,
        problems: vec![
            "read /run/bundle/config.json: No such file or directory (os error 2)".to_owned(),
        ],
        inspection_us: Some(287),
        duration_us: 412,
    }
}

fn created(report: &Report) -> Value {
    let mut line = CreateLine::new(report);
    line.id = Some("bb344d713010".to_owned());
    line.attempt = 1;
    line_of(line)
}

/// Longer than a line may be.
fn too_long() -> Report {
    let long = bind(
        &format!("/{}", "x".repeat(500)),
        Verdict::Dead("why".to_owned()),
        None,
    );
    Report {
        binds: [of_every_verdict(), vec![long; 2_000]].concat(),
        ..full()
    }
}

fn cut_off() -> Value {
    created(&too_long())
}

/// The lines of the NRI plugin and of repairs between creates.
fn of_version_2() -> Vec<Value> {
    let nri = |report: &Report| {
        let report = Report {
            bundle: None,
            ..report.clone()
        };
        let mut line = CreateLine::of_nri_plugin(&report);
        line.id = Some("bb344d713010".to_owned());
        line_of(line)
    };
    let rebind = |by, report: &Report| {
        line_by(|journal| record_rebind(journal, RebindLine::new(by, "eea5c325", "conf", report)))
    };
    let refresh = |line: RefreshLine| line_by(|journal| record_refresh(journal, line));
    let mut short = vec![
        nri(&full()),
        nri(&too_long()),
        rebind(Actor::Agent, &full()),
    ];
    short.push(rebind(Actor::Operator, &too_long()));
    short.extend([refreshed(None), refreshed(Some("process 7 ended"))].map(refresh));
    let mut long = refreshed(None);
    long.mounts = vec![
        RefreshedMount::new(
            Path::new(&"/x".repeat(300)),
            Path::new("/s"),
            MountResult::Hidden
        );
        2_000
    ];
    short.push(refresh(long));
    let nginx = ProgramName::from_text("nginx").unwrap();
    let signals = [
        Notify::Signal(NotifySignal::Usr1),
        Notify::Signal(NotifySignal::Usr2),
        Notify::Signal(NotifySignal::Winch),
        Notify::SignalProgram(NotifySignal::Hup, nginx),
    ];
    short.extend(signals.map(|request| {
        let mut line = RefreshLine::new(Actor::Operator, "bb344d713010", Identity::default());
        line.notification = Some(Notification {
            request,
            error: None,
        });
        refresh(line)
    }));
    let release = |line| line_by(|journal| record_release(journal, line));
    short.extend([released(1), released(2_000)].map(release));
    short
}

/// A refresh with every result.
fn refreshed(error: Option<&str>) -> RefreshLine {
    let methods = [
        AttachMethod::Beneath,
        AttachMethod::Tucked,
        AttachMethod::Finished,
    ];
    let replaced = methods.map(|method| MountResult::Replaced { method });
    let failed = MountResult::Failed {
        error: "move_mount: EINVAL".to_owned(),
    };
    let refuse = |reason| {
        MountResult::Refused(Refused {
            reason,
            path: "/srv/data/conf".into(),
            error: error.map(str::to_owned),
        })
    };
    let left = [
        MountResult::Stale,
        MountResult::KeyGone,
        MountResult::Hidden,
        MountResult::Occupied,
        MountResult::Missing,
        MountResult::Restless,
        failed,
    ];
    let mount = |outcome| {
        RefreshedMount::new(
            "/etc/app.conf".as_ref(),
            "/volume/app.conf".as_ref(),
            outcome,
        )
    };
    let mut line = RefreshLine::new(Actor::Agent, "bb344d713010", full().container);
    line.mounts = replaced
        .into_iter()
        .chain(left)
        .chain(RefusedReason::ALL.iter().copied().map(refuse))
        .map(mount)
        .collect();
    line.mounts[0].kind = Some(KindName::HostRoot);
    line.notification = Some(Notification {
        request: Notify::Touch,
        error: error.map(str::to_owned),
    });
    line.problems.extend(error.map(str::to_owned));
    line
}

/// A release with every result, so many times.
fn released(times: usize) -> ReleaseLine {
    let copy = |result, error: Option<&str>| ReleasedCopy {
        mount_point: "/host/mnt/disk".repeat(10),
        fs_type: "ext4".to_owned(),
        device: "8:16".to_owned(),
        result,
        error: error.map(str::to_owned),
    };
    let copies = [
        copy(ReleaseResult::Released, None),
        copy(ReleaseResult::Busy, Some("it is in use")),
        copy(ReleaseResult::Refused, Some("it was not recorded")),
    ];
    let mut line = ReleaseLine::new(Actor::Operator, "bb344d713010", full().container);
    line.copies = vec![copies; times].concat();
    line
}

fn refused() -> Value {
    let report = full();
    let mut line = CreateLine::new(&report);
    line.refused = Some("the bind source /srv is dead".to_owned());
    line_of(line)
}

fn unchecked(how: &str) -> Value {
    let how = how.parse().unwrap();
    line_by(|journal| {
        record_unchecked(
            journal,
            (Path::new("/run/bundle"), Some("bb344d713010")),
            0,
            (how, "no answer within 2s"),
            Some("policy refuses what may be there"),
        )
    })
}

fn lines() -> Vec<Value> {
    let clean = Report {
        binds: vec![bind("/", Verdict::Current, None)],
        ..Report::default()
    };
    let report = full();
    let mut verified = CreateLine::new(&report);
    verified.pid = Some(4242);
    let each = of_every_verdict().into_iter().map(|bind| {
        created(&Report {
            binds: vec![bind],
            ..Report::default()
        })
    });
    each.chain([
        created(&Report::default()),
        created(&clean),
        created(&full()),
        line_of(verified),
        refused(),
        unchecked("late"),
        unchecked("died"),
        cut_off(),
    ])
    .chain(of_version_2())
    .collect()
}

#[test]
fn written_lines_obey_the_schema() {
    let schema = schema();
    assert!(cut_off()["omitted_binds"].as_u64().unwrap() > 0);
    for line in lines() {
        assert_eq!(schema.faults_of(&line), [""; 0]);
    }
}

#[test]
fn the_documented_lines_obey_the_schema() {
    let page = include_str!("../../../../docs/journal.md");
    let shown: Vec<&str> = page
        .split("```json\n")
        .skip(1)
        .filter_map(|below| below.split("```").next())
        .collect();
    assert!(!shown.is_empty());
    for block in shown {
        assert_eq!(
            schema().faults_of(&serde_json::from_str(block).unwrap()),
            [""; 0]
        );
    }
}

/// Follows references within the schema.
fn description_of<'a>(schema: &'a Value, mut value: &'a Value) -> String {
    while let Some(reference) = value["$ref"].as_str() {
        value = schema.pointer(&reference[1..]).unwrap();
    }
    value["description"].as_str().unwrap().to_owned()
}

/// The page's tables of results have the schema's own text.
#[test]
fn the_page_has_the_descriptions_of_the_schema() {
    let Schema(schema) = schema();
    let page = include_str!("../../../../docs/journal.md");
    for name in ["outcome", "refreshed"] {
        for way in schema["$defs"][name]["oneOf"].as_array().unwrap() {
            let result = way["properties"]["result"]["const"].as_str().unwrap();
            let row = format!("| `{result}` | {} |", description_of(&schema, way));
            assert!(
                page.lines().any(|line| line == row),
                "docs/journal.md lacks {row}"
            );
        }
    }
}

/// A key of the schema that no line has, and an enum value that no line has, are not true.
#[test]
fn the_schema_allows_only_what_is_written() {
    let Schema(schema) = schema();
    let lines = lines();
    let all = |key: &str| {
        lines
            .iter()
            .filter_map(|line| line[key].as_array())
            .flatten()
            .collect::<Vec<_>>()
    };
    let (binds, mounts) = (all("binds"), all("mounts"));
    let keys = |of: &Value| {
        of["properties"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<Vec<_>>()
    };
    for kind in ["create", "nri-create", "rebind", "refresh", "release"] {
        let is_of_kind = |line: &&Value| {
            line.get("kind")
                .map_or("create", |kind| kind.as_str().unwrap())
                == kind
        };
        for key in keys(&schema["$defs"][kind]) {
            assert!(
                lines
                    .iter()
                    .filter(is_of_kind)
                    .any(|line| line.get(&key).is_some()),
                "no line of {kind} has {key}"
            );
        }
    }
    for way in schema["$defs"]["refreshed"]["oneOf"].as_array().unwrap() {
        let result = &way["properties"]["result"]["const"];
        assert!(
            mounts
                .iter()
                .any(|mount| &mount["outcome"]["result"] == result),
            "no result is {result}"
        );
    }
    let copies = all("copies");
    for key in keys(&schema["$defs"]["copy"]) {
        assert!(
            copies.iter().any(|copy| copy.get(&key).is_some()),
            "no copy has {key}"
        );
    }
    for result in schema["$defs"]["copy"]["properties"]["result"]["enum"]
        .as_array()
        .unwrap()
    {
        assert!(
            copies.iter().any(|copy| &copy["result"] == result),
            "no result is {result}"
        );
    }
    let requests = lines
        .iter()
        .filter_map(|line| line["notification"]["request"].as_str());
    let requests: Vec<&str> = requests.collect();
    for request in [
        "touch",
        "signal:SIGUSR1",
        "signal:SIGWINCH",
        "signal:SIGHUP@nginx",
    ] {
        assert!(requests.contains(&request), "no request is {request}");
    }
    for key in keys(&schema["$defs"]["container"]) {
        assert!(
            lines
                .iter()
                .any(|line| line["container"].get(&key).is_some()),
            "no container has {key}"
        );
    }
    for key in keys(&schema["$defs"]["bind"]) {
        assert!(
            binds.iter().any(|bind| bind.get(&key).is_some()),
            "no bind has {key}"
        );
    }
    for key in ["kind", "verdict"] {
        for word in schema["$defs"]["bind"]["properties"][key]["enum"]
            .as_array()
            .unwrap()
        {
            assert!(
                binds.iter().any(|bind| &bind[key] == word),
                "no {key} is {word}"
            );
        }
    }
    for way in schema["$defs"]["outcome"]["oneOf"].as_array().unwrap() {
        let result = &way["properties"]["result"]["const"];
        assert!(
            binds
                .iter()
                .any(|bind| &bind["outcome"]["result"] == result),
            "no outcome is {result}"
        );
    }
}

/// Each line has a single mistake; the schema detects the mistake.
#[test]
fn lines_that_are_never_written_do_not_obey_the_schema() {
    let schema = schema();
    let good = created(&full());
    let broken = |pointer: &str, value: Value| {
        let mut line = good.clone();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        line.pointer_mut(parent).unwrap()[key] = value;
        assert_ne!(schema.faults_of(&line), [""; 0], "{pointer}");
    };
    broken("/more", json!(1));
    broken("/attempt", json!(-1));
    broken("/foreign", json!("6"));
    broken("/problems", json!([]));
    broken("/container", json!({}));
    broken("/container/node", json!("worker"));
    broken("/binds/0/verdict", json!("foreign"));
    broken("/binds/0/kind", json!("bind"));
    broken("/binds/1/outcome/result", json!("corrected"));
    broken("/binds/1/outcome/error", json!("no field of this outcome"));
    for line in of_version_2() {
        for (key, value) in [
            ("version", json!(1)),
            ("kind", json!("create")),
            ("time", json!(5)),
            ("more", json!(1)),
        ] {
            let mut line = line.clone();
            line[key] = value;
            assert_ne!(schema.faults_of(&line), [""; 0], "{key}");
        }
    }
    for key in ["time", "attempt", "binds", "foreign", "duration_us"] {
        let mut line = good.clone();
        line.as_object_mut().unwrap().remove(key);
        assert_ne!(schema.faults_of(&line), [""; 0], "{key}");
    }
}

#[test]
fn the_page_of_refreshes_names_each_reason() {
    let page = include_str!("../../../../docs/refresh.md");
    for reason in RefusedReason::ALL {
        let reason = serde_json::to_value(reason).unwrap();
        let name = format!("`{}`", reason.as_str().unwrap());
        assert!(page.contains(&name), "docs/refresh.md lacks {name}");
    }
}
