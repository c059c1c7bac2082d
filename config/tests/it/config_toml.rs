//! The accepted content of a config file, and the errors for any other content.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_config::{Config, Error, EventMode, RefreshMode};
use bindguard_core::error_chain;
use bindguard_core::policy::{Alarm, Mode, ReadOnlyBinds};

/// The file that a node gets, with every key uncommented.
fn shipped_with_every_key() -> String {
    let uncommented = |line: &str| match line.strip_prefix("# ") {
        Some(key) if key.contains(" = ") => key.to_owned(),
        _ => line.to_owned(),
    };
    include_str!("../../config.toml").lines().map(uncommented).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_shipped_file_says_what_is_in_force_without_it() {
    assert_eq!(Config::from_toml(include_str!("../../config.toml")).unwrap(), Config::default());
    assert_eq!(Config::from_toml(&shipped_with_every_key()).unwrap(), Config::default());
    assert!(shipped_with_every_key().contains("\ndeadline-ms = 2000"));
}

#[test]
fn every_key_counts() {
    let config = Config::from_toml(
        "guard.deadline-ms = 500\nruntime.path = '/usr/bin/crun'\nkubelet.roots = ['/data/kubelet']\n\
         checks = { stale-subpaths = 'report', host-root = 'off', unmounted-volumes = 'refuse', dead-sources = 'off' }\nhost-root.extra-directories = ['/mnt/pods']\nhost-root.read-only = 'keep'\n\
         journal.enabled = false\n",
    )
    .unwrap();
    assert_eq!(config.deadline(), Duration::from_millis(500));
    assert_eq!(config.runtime(), Path::new("/usr/bin/crun"));
    assert_eq!(config.journal(), None);
    let policy = config.policy();
    assert_eq!((policy.stale_subpaths, policy.host_root), (Mode::Report, Mode::Off));
    assert_eq!((policy.unmounted_volumes, policy.dead_sources), (Alarm::Refuse, Alarm::Off));
    assert_eq!(policy.read_only_binds, ReadOnlyBinds::Keep);
    assert_eq!(config.places().kubelet_roots, [PathBuf::from("/data/kubelet")]);
    assert!(
        ["/mnt", "/run"].iter().all(|path| config.places().holds_runtime_mounts(path.as_ref(), policy.host_root_scope))
    );
}

#[test]
fn every_key_for_kubernetes_counts() {
    let config = Config::from_toml(
        "agent.kubernetes = { kubeconfig = '/k.conf', node = 'n-1' }\n\
         agent.events = { mode = 'warnings', requests-per-minute = 60 }\nagent.node-state.enabled = true\n",
    )
    .unwrap();
    let kubernetes = &config.agent().kubernetes;
    assert_eq!(
        (kubernetes.kubeconfig.as_deref(), kubernetes.node.as_deref()),
        (Some(Path::new("/k.conf")), Some("n-1"))
    );
    assert_eq!((kubernetes.events, kubernetes.event_requests, kubernetes.node_state), (EventMode::Warnings, 60, true));
    for wrong in ["events.mode = 'some'", "events.requests-per-minute = 0", "kubernetes.kubeconfig = 'k.conf'"] {
        assert!(Config::from_toml(&format!("agent.{wrong}")).is_err(), "{wrong}");
    }
}

#[test]
fn every_key_of_the_agent_counts() {
    let config = Config::from_toml(
        "agent = { metrics = '[::]:9000', socket = '/run/a.sock', survey-seconds = 5 }\nrefresh.mode = 'all'\n",
    )
    .unwrap();
    let agent = config.agent();
    assert_eq!(agent.metrics.map(|address| address.to_string()).as_deref(), Some("[::]:9000"));
    assert_eq!((agent.socket.as_path(), agent.survey), (Path::new("/run/a.sock"), Duration::from_secs(5)));
    assert_eq!(agent.refresh, RefreshMode::All);
    assert_eq!(Config::from_toml("agent.metrics = 'off'").unwrap().agent().metrics, None);
    let kubediag = |text: &str| Config::from_toml(text).unwrap().agent().kubediag.map(|address| address.to_string());
    assert_eq!(kubediag("agent.kubediag.listen = '[::1]:1'"), None);
    assert_eq!(kubediag("agent.kubediag.enabled = true").as_deref(), Some("127.0.0.1:9475"));
    assert_eq!(kubediag("agent.kubediag = { enabled = true, listen = '[::1]:1' }").as_deref(), Some("[::1]:1"));
    let nri = |text: &str| Config::from_toml(text).unwrap().agent().nri.clone();
    assert_eq!(nri("agent.nri.socket = '/run/n.sock'"), None);
    assert_eq!(nri("agent.nri.enabled = true").as_deref(), Some(Path::new("/var/run/nri/nri.sock")));
    assert_eq!(nri("agent.nri = { enabled = true, socket = '/run/n.sock' }"), Some("/run/n.sock".into()));
}

#[test]
fn an_error_is_reported_with_its_line() {
    for (text, line, named) in [
        ("\n[gaurd]\n", "line 2", "gaurd"),
        ("[guard]\ndeadline-ms = 'soon'\n", "line 2", "u64"),
        ("[checks]\nhost-root = 'fix'\n", "line 2", "repair"),
        ("[host-root]\nread-only = 'private'\n", "line 2", "keep"),
        ("[checks\n", "line 1", "]"),
        ("[kubelet]\nroots = ['/a', 'data/kubelet']\n", "line 2", "expected \"/"),
        ("\n[journal]\npath = 'journal.jsonl'\n", "line 3", "expected \"/"),
        ("[agent]\nmetrics = 'localhost'\n", "line 2", "IP:PORT"),
        ("[agent]\nsurvey-seconds = 0\n", "line 2", "1 or more"),
        ("[refresh]\nmode = 'on'\n", "line 2", "annotated"),
        ("[agent.kubediag]\nlisten = 'off'\n", "line 2", "IP:PORT"),
        ("[host-root]\nextra-directories = ['mnt']\n", "line 2", "\"mnt\""),
    ] {
        let error = Config::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(line) && error.contains(named), "{text:?} gives {error}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Config::from_file(Path::new("/nowhere/config.toml")).unwrap_err();
    assert!(matches!(error, Error::Read { .. }));
    assert_eq!(error_chain(&error), "read /nowhere/config.toml: No such file or directory (os error 2)");
}

#[test]
fn an_invalid_config_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    for (bytes, told) in [
        (&b"[guard]\n[checks]\nhost-root = 'fix'\n"[..], "config.toml, line 3: "),
        (b"22 27 0:21 / /proc rw,relatime - proc proc rw\n", "config.toml, line 1: "),
        (b"\xff\xfe\x00", "it is not text"),
        (&[0; 1 << 21], "larger than 1 MiB"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = error_chain(&Config::from_file(&file).unwrap_err());
        assert!(error.contains(told) && error.lines().count() == 1, "{error:?}");
    }
}
