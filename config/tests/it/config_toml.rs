//! The accepted content of a config file, and the errors for any other content.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_config::{Config, Error, EventMode, Loaded, RefreshMode};
use bindguard_core::error_chain;
use bindguard_core::policy::{Alarm, Mode, ReadOnlyBinds};

/// The file that a node gets, with every key uncommented.
fn shipped_with_every_key() -> String {
    let uncommented = |line: &str| match line.strip_prefix("# ") {
        Some(key) if key.contains(" = ") => key.to_owned(),
        _ => line.to_owned(),
    };
    include_str!("../../config.toml")
        .lines()
        .map(uncommented)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The config as `config show` prints it.
fn shown(config: &Config) -> String {
    config
        .active_keys()
        .iter()
        .map(|key| format!("{} = {}\n", key.name, key.value))
        .collect()
}

#[test]
fn the_shipped_file_says_what_is_in_force_without_it() {
    assert_eq!(
        Config::from_toml(include_str!("../../config.toml")).unwrap(),
        Config::default()
    );
    assert_eq!(
        Config::from_toml(&shipped_with_every_key()).unwrap(),
        Config::default()
    );
    assert!(shipped_with_every_key().contains("\n[guard]\n"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, shipped_with_every_key()).unwrap();
    let names: Vec<_> = Config::default()
        .active_keys()
        .iter()
        .map(|key| key.name)
        .collect();
    assert_eq!(
        Loaded::from_file(&file).unwrap().set,
        names,
        "not every key is in the shipped file"
    );
}

/// Each of the words that changes less than the default has its effect where only its line is
/// uncommented.
#[test]
fn a_line_of_the_shipped_file_that_is_uncommented_belongs_to_its_table() {
    let shipped = include_str!("../../config.toml");
    let mut keys = 0;
    for line in shipped.lines() {
        let Some(key) = line.strip_prefix("# ").filter(|key| key.contains(" = ")) else {
            continue;
        };
        let changed = key.replace("\"repair\"", "\"report\"");
        let text = shipped.replace(&format!("\n{line}\n"), &format!("\n{changed}\n"));
        let (config, warnings) = Config::parse(&text).unwrap();
        assert!(warnings.is_empty(), "{key}: {warnings:?}");
        assert_eq!(config == Config::default(), changed == key, "{key}");
        keys += 1;
    }
    assert_eq!(keys, Config::default().active_keys().len());
}

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut pages = vec![root.join("README.md")];
    for folder in ["docs", "docs/decisions"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages
}

/// A key without its table has no effect where a reader puts it.
#[test]
fn a_key_in_the_text_of_a_page_has_its_table() {
    let default = Config::default().active_keys();
    let mut keys = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for code in text.split('`').skip(1).step_by(2) {
            let Some((key, _)) = code.rsplit_once(" = ") else {
                continue;
            };
            let key = key.rsplit(' ').next().unwrap();
            let is_known = |known: &str| known.rsplit('.').next() == Some(key);
            if code.contains('\n') || !default.iter().any(|known| is_known(known.name)) {
                continue;
            }
            let (_, warnings) = Config::parse(&code.replace("] ", "]\n")).unwrap();
            assert!(
                warnings.is_empty(),
                "{}: {code}: {warnings:?}",
                page.display()
            );
            keys += 1;
        }
    }
    assert!(keys >= 10, "{keys} keys");
}

/// An operator puts the keys of a snippet of the docs below the header that the shipped file has.
#[test]
fn every_snippet_of_the_docs_has_a_place_in_the_shipped_file() {
    let mut snippets = 0;
    for page in pages() {
        for snippet in fs::read_to_string(&page)
            .unwrap()
            .split("```toml\n")
            .skip(1)
        {
            let snippet = snippet.split("```").next().unwrap();
            let mut file = include_str!("../../config.toml").to_owned();
            for table in snippet.split("\n\n") {
                let (header, keys) = table.split_once('\n').unwrap();
                let header = format!("\n{header}\n");
                assert!(file.contains(&header), "{}: {snippet}", page.display());
                file = file.replace(&header, &format!("{header}{keys}\n"));
            }
            let (config, warnings) = Config::parse(&file)
                .unwrap_or_else(|error| panic!("{}: {snippet}{error}", page.display()));
            assert!(
                warnings.is_empty(),
                "{}: {snippet}{warnings:?}",
                page.display()
            );
            assert_ne!(config, Config::default(), "{}: {snippet}", page.display());
            snippets += 1;
        }
    }
    assert!(snippets >= 4, "{snippets} snippets");
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
    assert_eq!(
        (policy.stale_subpaths, policy.host_root),
        (Mode::Report, Mode::Off)
    );
    assert_eq!(
        (policy.unmounted_volumes, policy.dead_sources),
        (Alarm::Refuse, Alarm::Off)
    );
    assert_eq!(policy.read_only_binds, ReadOnlyBinds::Keep);
    assert_eq!(
        config.places().kubelet_roots,
        [PathBuf::from("/data/kubelet")]
    );
    assert!(["/mnt", "/run"].iter().all(|path| {
        config
            .places()
            .holds_runtime_mounts(path.as_ref(), policy.host_root_scope)
    }));
}

#[test]
fn every_key_for_kubernetes_counts() {
    let config = Config::from_toml(
        "agent.kubernetes = { kubeconfig = '/k.conf', node = 'n-1' }\n\
         agent.events = { mode = 'warnings', requests-per-minute = 60 }\n",
    )
    .unwrap();
    let kubernetes = &config.agent().kubernetes;
    assert_eq!(
        (kubernetes.kubeconfig.as_deref(), kubernetes.node.as_deref()),
        (Some(Path::new("/k.conf")), Some("n-1"))
    );
    assert_eq!(
        (kubernetes.events, kubernetes.event_requests),
        (EventMode::Warnings, 60)
    );
}

#[test]
fn every_key_of_the_agent_counts() {
    let config = Config::from_toml(
        "agent = { metrics = '[::]:9000', socket = '/run/a.sock', survey-seconds = 5 }\nrefresh.mode = 'all'\n",
    )
    .unwrap();
    let agent = config.agent();
    assert_eq!(
        agent.metrics.map(|address| address.to_string()).as_deref(),
        Some("[::]:9000")
    );
    assert_eq!(
        (agent.socket.as_path(), agent.survey),
        (Path::new("/run/a.sock"), Duration::from_secs(5))
    );
    assert_eq!(agent.refresh, RefreshMode::All);
    assert_eq!(
        Config::from_toml("agent.metrics = 'off'")
            .unwrap()
            .agent()
            .metrics,
        None
    );
    let kubediag = |text: &str| {
        Config::from_toml(text)
            .unwrap()
            .agent()
            .kubediag
            .map(|address| address.to_string())
    };
    assert_eq!(kubediag("agent.kubediag.listen = '[::1]:1'"), None);
    assert_eq!(
        kubediag("agent.kubediag.enabled = true").as_deref(),
        Some("127.0.0.1:9475")
    );
    assert_eq!(
        kubediag("agent.kubediag = { enabled = true, listen = '[::1]:1' }").as_deref(),
        Some("[::1]:1")
    );
    let nri = |text: &str| Config::from_toml(text).unwrap().agent().nri.clone();
    assert_eq!(nri("agent.nri.socket = '/run/n.sock'"), None);
    assert_eq!(
        nri("agent.nri.enabled = true").as_deref(),
        Some(Path::new("/var/run/nri/nri.sock"))
    );
    assert_eq!(
        nri("agent.nri = { enabled = true, socket = '/run/n.sock' }"),
        Some("/run/n.sock".into())
    );
}

#[test]
fn a_mistake_is_reported_with_its_line_and_a_safe_value_applies() {
    for (text, line, named, effect) in [
        ("\n[gaurd]\n", 2, "unknown key `gaurd`", ""),
        (
            "[checks]\nstale-subpath = 'report'\n",
            2,
            "unknown key `checks.stale-subpath`, similar to `checks.stale-subpaths`;",
            "",
        ),
        (
            "[guard]\ndeadline-ms = 'soon'\n",
            2,
            "a number from 1",
            "guard.deadline-ms = 2000",
        ),
        (
            "[guard]\ndeadline-ms = 0\n",
            2,
            "a number from 1",
            "guard.deadline-ms = 2000",
        ),
        (
            "[checks]\nhost-root = 'fix'\n",
            2,
            "\"repair\", \"report\" or \"off\"",
            "checks.host-root = \"report\"",
        ),
        (
            "[checks]\nstale-subpaths = false\n",
            2,
            "\"repair\"",
            "checks.stale-subpaths = \"report\"",
        ),
        (
            "[checks]\ndead-sources = 'refused'\n",
            2,
            "\"refuse\"",
            "checks.dead-sources = \"report\"",
        ),
        (
            "checks = 'report'\n",
            1,
            "`checks` is no table",
            "checks.host-root = \"report\"",
        ),
        (
            "[[checks]]\n",
            1,
            "`checks` is no table",
            "checks.stale-subpaths = \"report\"",
        ),
        (
            "refresh = 'off'\n",
            1,
            "`refresh` is no table",
            "refresh.mode = \"off\"",
        ),
        (
            "[refresh]\nmode = 'none'\n",
            2,
            "\"annotated\"",
            "refresh.mode = \"off\"",
        ),
        (
            "[host-root]\nread-only = 'private'\n",
            2,
            "keep",
            "host-root.read-only = \"keep\"",
        ),
        (
            "[kubelet]\nroots = ['/a', 'data/kubelet']\n",
            2,
            "expected \"/",
            "kubelet.roots = [\"/a\"]",
        ),
        (
            "\n[journal]\npath = 'journal.jsonl'\n",
            3,
            "\"/...\"",
            "journal.path = \"/run/bindguard/journal.jsonl\"",
        ),
        (
            "[agent]\nmetrics = 'localhost'\n",
            2,
            "IP:PORT",
            "agent.metrics = \"off\"",
        ),
        (
            "[agent]\nsurvey-seconds = 0\n",
            2,
            "from 1",
            "agent.survey-seconds = 300",
        ),
        (
            "[agent.kubediag]\nlisten = 'off'\n",
            2,
            "IP:PORT",
            "agent.kubediag.listen = \"127.0.0.1:9475\"",
        ),
        (
            "agent.events.mode = 'some'",
            1,
            "\"warnings\"",
            "agent.events.mode = \"off\"",
        ),
        (
            "agent.kubernetes.kubeconfig = 'k.conf'",
            1,
            "\"/...\"",
            "agent.kubernetes.kubeconfig = \"\"",
        ),
        (
            "[host-root]\nextra-directories = ['mnt']\n",
            2,
            "'mnt'",
            "host-root.extra-directories = []",
        ),
        (
            "[runtime]\npath = ''\n",
            2,
            "a program's name",
            "runtime.path = \"runc\"",
        ),
    ] {
        let (config, warnings) = Config::parse(text).unwrap();
        let [warning] = &warnings[..] else {
            panic!("{text:?} gives {warnings:?}")
        };
        assert!(
            warning.line == line && warning.message.contains(&named.replace("expected ", "")),
            "{text:?}: {warning}"
        );
        assert!(
            shown(&config).contains(effect),
            "{text:?} gives {}",
            shown(&config)
        );
    }
}

#[test]
fn a_text_that_is_not_toml_is_an_error_with_its_line() {
    for (text, line, named) in [
        ("[checks\n", 1, "]"),
        ("\n[checks]\n[checks]\n", 3, "duplicate key checks"),
        (
            "[checks]\nhost-root = 'off'\nhost-root = 'off'\n",
            3,
            "duplicate key host-root",
        ),
    ] {
        let error = Config::from_toml(text).unwrap_err();
        assert!(
            error.line == line && error.message.contains(named),
            "{text:?} gives {error:?}"
        );
    }
}

/// A file of a mebibyte can have a hundred thousand mistakes, and each create records them.
#[test]
fn mistakes_are_few_and_short() {
    let text: String = (0..9000)
        .map(|number| format!("k{number} = 1\n\"{}{number}\\n\" = 1\n", "x".repeat(99)))
        .collect();
    let (_, warnings) = Config::parse(&text).unwrap();
    assert_eq!(warnings.len(), 16);
    assert!(
        warnings[15].message.ends_with("more mistakes follow"),
        "{}",
        warnings[15]
    );
    assert!(
        warnings
            .iter()
            .all(|warning| warning.message.len() < 200 && !warning.message.contains('\n'))
    );
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Loaded::from_file(Path::new("/nowhere/config.toml")).unwrap_err();
    assert!(matches!(error, Error::File { .. }));
    assert_eq!(
        error_chain(&error),
        "read /nowhere/config.toml: No such file or directory (os error 2)"
    );
}

#[test]
fn an_invalid_config_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    for (bytes, told) in [
        (
            &b"[guard]\n[checks]\nhost-root = fix\n"[..],
            "config.toml, line 3: ",
        ),
        (
            b"22 27 0:21 / /proc rw,relatime - proc proc rw\n",
            "config.toml, line 1: ",
        ),
        (b"\xff\xfe\x00", "it is not text"),
        (&[0; 1 << 21], "larger than 1 MiB"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = error_chain(&Loaded::from_file(&file).unwrap_err());
        assert!(
            error.contains(told) && error.lines().count() == 1,
            "{error:?}"
        );
    }
}
