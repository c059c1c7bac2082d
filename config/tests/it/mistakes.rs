//! A mistake in `config.toml` changes the key that has it, and no other key. What was typed about
//! `report`, `refuse` or `off` never ends in `repair`.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use bindguard_config::{Config, KEPT_PATH, load_by};
use bindguard_core::policy::Mode;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

/// Every key, with values that are not its default.
const VALUES: [(&str, &[&str]); 30] = [
    ("guard.deadline-ms", &["500", "0x7d1"]),
    ("guard.failed-repairs", &["\"refuse\""]),
    ("runtime.path", &["\"/usr/bin/crun\"", "'youki'"]),
    (
        "kubelet.roots",
        &["[\"/data/kubelet\"]", "[ '/a', '/b' ]", "[]"],
    ),
    ("checks.stale-subpaths", &["\"report\"", "'off'"]),
    ("checks.host-root", &["\"report\"", "\"off\""]),
    ("checks.unmounted-volumes", &["\"refuse\"", "\"off\""]),
    ("checks.dead-sources", &["\"refuse\"", "\"off\""]),
    ("checks.proof", &["\"refuse\"", "\"off\""]),
    ("checks.vanished-directories", &["\"remake\""]),
    ("checks.mounts-below-emptydir", &["\"detach\"", "\"off\""]),
    ("host-root.scope", &["\"host-root\"", "\"any-submounts\""]),
    ("host-root.read-only", &["\"keep\""]),
    ("host-root.extra-directories", &["[\"/mnt\"]"]),
    ("annotations.mode", &["true"]),
    ("annotations.propagation", &["true"]),
    ("journal.enabled", &["false"]),
    ("journal.path", &["\"/j\""]),
    ("agent.metrics", &["\"off\"", "\"[::]:9\""]),
    ("agent.socket", &["\"/s\""]),
    ("agent.survey-seconds", &["5"]),
    ("agent.nri.enabled", &["true"]),
    ("agent.nri.socket", &["\"/n\""]),
    ("agent.kubernetes.kubeconfig", &["\"/k\""]),
    ("agent.kubernetes.node", &["\"n\"", "\"\\\"\\\\\""]),
    ("agent.events.mode", &["\"all\"", "\"warnings\""]),
    ("agent.events.requests-per-minute", &["7"]),
    ("agent.kubediag.enabled", &["true"]),
    ("agent.kubediag.listen", &["\"0.0.0.0:1\""]),
    ("refresh.mode", &["\"all\"", "\"off\""]),
];

/// The tables of a file, each with its keys and values.
type File = BTreeMap<String, BTreeMap<String, String>>;

fn file() -> impl Strategy<Value = File> {
    let keys = subsequence(VALUES.to_vec(), 1..=VALUES.len());
    keys.prop_flat_map(|keys| {
        keys.into_iter()
            .map(|(key, values)| (Just(key), select(values)))
            .collect::<Vec<_>>()
    })
    .prop_map(|keys| {
        let mut file = File::new();
        for (name, value) in keys {
            let (table, key) = name.rsplit_once('.').unwrap();
            file.entry(table.to_owned())
                .or_default()
                .insert(key.to_owned(), value.to_owned());
        }
        file
    })
}

fn text(file: &File) -> String {
    let lines = |keys: &BTreeMap<String, String>| {
        keys.iter()
            .map(|(key, value)| format!("{key} = {value}\n"))
            .collect::<String>()
    };
    file.iter()
        .map(|(table, keys)| format!("[{table}]\n{}", lines(keys)))
        .collect()
}

fn values(config: &Config) -> BTreeMap<&'static str, String> {
    config
        .active_keys()
        .into_iter()
        .map(|key| (key.name, key.value.to_string()))
        .collect()
}

/// Any TOML value, and typical mistakes.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z-]{0,9}".prop_map(|word| format!("{word:?}")),
        any::<i64>().prop_map(|number| number.to_string()),
        select(
            &[
                "true",
                "1.5",
                "[]",
                "{}",
                "[1]",
                "['a', '/b']",
                "{ x = 1 }",
                "1979-05-27",
                "\"refused\"",
                "\"Report\""
            ][..]
        )
        .prop_map(str::to_owned),
    ]
}

/// The config of a node whose file has this text. Its last valid file, if there is one, repairs.
fn node_config(text: &str, is_kept: bool) -> Config {
    let kept =
        "checks = { stale-subpaths = 'repair', host-root = 'repair' }\nrefresh.mode = 'all'\n";
    let loaded = load_by(|path, _| match path == Path::new(KEPT_PATH) {
        true if is_kept => Ok(kept.into()),
        true => Err(io::ErrorKind::NotFound.into()),
        false => Ok(text.into()),
    });
    loaded.config
}

/// The value of a key that would change the node, while the file may say something else.
fn reported(key: &str) -> Option<&'static str> {
    match key {
        "checks.stale-subpaths" | "checks.host-root" | "checks.mounts-below-emptydir" => {
            Some("\"report\"")
        }
        "refresh.mode" => Some("\"off\""),
        _ => None,
    }
}

/// The text with one or two typing mistakes.
fn misspelt(text: &'static str) -> impl Strategy<Value = String> {
    let edit = (any::<prop::sample::Index>(), "[a-z_-]?", 0..2usize);
    proptest::collection::vec(edit, 1..3).prop_map(move |edits| {
        let mut text = text.to_owned();
        for (at, new, old) in edits {
            let at = at.index(text.len());
            text.replace_range(at..(at + old).min(text.len()), &new);
            if text.is_empty() {
                text.push('x');
            }
        }
        text
    })
}

fn table_header() -> impl Strategy<Value = String> {
    let known = VALUES.map(|(name, _)| name.rsplit_once('.').unwrap().0);
    prop_oneof![
        Just(String::new()),
        Just("[checks]\n".to_owned()),
        select(known.to_vec()).prop_map(|table| format!("[{table}]\n")),
        misspelt("checks").prop_map(|table| format!("[{table}]\n")),
        select(
            &[
                "[Checks]\n",
                "[CHECKS]\n",
                "[\"checks \"]\n",
                "[agent.checks]\n",
                "[[checks]]\n",
                "[checks\n"
            ][..]
        )
        .prop_map(str::to_owned),
    ]
}

fn key_name(key: &'static str) -> impl Strategy<Value = String> {
    prop_oneof![
        Just(key.to_owned()),
        misspelt(key),
        Just(key.to_uppercase()),
        Just(key.replace('-', "_")),
        Just(key.replace('-', " ")),
        Just(format!("checks.{key}")),
        Just(format!("\"checks.{key}\"")),
        Just(format!("\"{key}\"")),
        Just(format!("{key}.mode")),
    ]
}

fn typed_word() -> impl Strategy<Value = String> {
    let word = select(&["report", "refuse", "off"][..]).prop_flat_map(|word| {
        prop_oneof![
            Just(word.to_owned()),
            Just(word.to_uppercase()),
            misspelt(word)
        ]
    });
    let quotes = [
        "\"W\"",
        "'W'",
        "W",
        "\"W",
        "W\"",
        "“W”",
        "\"'W'\"",
        "['W']",
        "{ mode = 'W' }",
        "\"\"\"W\"\"\"",
        "false",
    ];
    (word, select(quotes.to_vec())).prop_map(|(word, quotes)| quotes.replace('W', &word))
}

/// The comment above the key of [annotations] has the words of a mode.
#[test]
fn a_mode_in_the_table_of_annotations_never_ends_in_repair() {
    for text in [
        "[annotations]\nmode = \"report\"\n",
        "annotations = \"off\"\n",
    ] {
        let config = Config::from_toml(text).unwrap();
        assert_eq!(config.policy().stale_subpaths, Mode::Report, "{text}");
    }
}

/// After a rollback an older version reads the keys of a newer one.
#[test]
fn a_key_that_means_no_check_stops_no_repair() {
    let newer = "[audit]\nrates = [1, 2.5]\nsocket = '/run/audit.sock'\n[audit.off]\n[guard]\nretries = 3\n";
    let (config, warnings) = Config::parse(newer).unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn every_key_is_tried() {
    let names: Vec<_> = Config::default()
        .active_keys()
        .iter()
        .map(|key| key.name)
        .collect();
    assert_eq!(VALUES.map(|(name, _)| name)[..], names);
}

proptest! {
    #[test]
    fn a_wrong_value_changes_its_own_key_alone(file in file(), at in any::<prop::sample::Index>(), wrong in any_value()) {
        let before = values(&Config::from_toml(&text(&file)).unwrap());
        let names: Vec<(String, String)> =
            file.iter().flat_map(|(table, keys)| keys.keys().map(|key| (table.clone(), key.clone()))).collect();
        let (table, key) = at.get(&names);
        let mut changed = file.clone();
        changed.get_mut(table).unwrap().insert(key.clone(), wrong);
        let (config, _) = Config::parse(&text(&changed)).unwrap();
        let name = format!("{table}.{key}");
        for (other, value) in values(&config) {
            let is_reported = table == "annotations" && reported(other) == Some(&value);
            prop_assert!(other == name || before[other] == value || is_reported, "{other} became {value} by a change of {name}");
        }
    }

    #[test]
    fn a_misspelt_key_loses_no_other(file in file(), at in any::<prop::sample::Index>(), new in "[a-z]{1,8}", more in any_value()) {
        let before = values(&Config::from_toml(&text(&file)).unwrap());
        let names: Vec<(String, String)> =
            file.iter().flat_map(|(table, keys)| keys.keys().map(|key| (table.clone(), key.clone()))).collect();
        let (table, key) = at.get(&names);
        let mut changed = file.clone();
        let keys = changed.get_mut(table).unwrap();
        let value = keys.remove(key).unwrap();
        keys.insert(format!("{key}-{new}"), value);
        changed.insert(format!("x{new}"), BTreeMap::from([("k".to_owned(), more)]));
        let (config, warnings) = Config::parse(&text(&changed)).unwrap();
        prop_assert_eq!(warnings.len(), 2, "{:?}", warnings);
        let name = format!("{table}.{key}");
        let defaults = values(&Config::default());
        for (other, value) in values(&config) {
            let unchanged = if other == name { &defaults[other] } else { &before[other] };
            prop_assert!(value == *unchanged || reported(other) == Some(&value), "{} is {}", other, value);
        }
    }

    /// The table, the key and the value are each typed rightly or wrongly, and the key may be there
    /// a second time.
    #[test]
    fn a_typed_word_never_ends_in_repair(
        (key, table, name, value) in select(&["stale-subpaths", "host-root"][..])
            .prop_flat_map(|key| (Just(key), table_header(), key_name(key), typed_word())),
        double in select(&["", "[checks]\nKEY = \"repair\"\n", "checks.KEY = 'repair'\n", "checks = { KEY = 'repair' }\n"][..]),
        is_first in any::<bool>(),
        is_kept in any::<bool>(),
    ) {
        let (typed, double) = (format!("{table}{name} = {value}\n"), double.replace("KEY", key));
        let text = if is_first { typed + &double } else { double + &typed };
        let config = node_config(&text, is_kept);
        let mode = match key {
            "host-root" => config.policy().host_root,
            _ => config.policy().stale_subpaths,
        };
        prop_assert_ne!(mode, Mode::Repair, "{}", text);
    }

    /// Every key has its own line. Any text replaces a line.
    #[test]
    fn a_line_of_any_text_changes_its_own_key_alone(file in file(), at in any::<prop::sample::Index>(), line in "[^\\[\n\r][ -~]{0,20}") {
        let lines: Vec<(String, String)> = file
            .iter()
            .flat_map(|(table, keys)| keys.iter().map(move |(key, value)| (format!("{table}.{key}"), value.clone())))
            .collect();
        let text = |line_of: &dyn Fn(&(String, String)) -> String| lines.iter().map(line_of).collect::<String>();
        let usual = |(key, value): &(String, String)| format!("{key} = {value}\n");
        let (touched, _) = at.get(&lines);
        let before = values(&Config::from_toml(&text(&usual)).unwrap());
        let changed = text(&|pair| if pair.0 == *touched { format!("{line}\n") } else { usual(pair) });
        if let Ok(config) = Config::from_toml(&changed) {
            let names_another = |other: &str| line.trim_start().starts_with(other.split('.').next().unwrap());
            for (other, value) in values(&config) {
                prop_assert!(other == touched || before[other] == value || names_another(other), "{other} became {value} in {changed}");
            }
        }
    }

    #[test]
    fn what_is_shown_is_the_same_config(file in file()) {
        let config = Config::from_toml(&text(&file)).unwrap();
        let shown: String = config.active_keys().iter().map(|key| format!("{} = {}\n", key.name, key.value)).collect();
        let (again, warnings) = Config::parse(&shown).unwrap();
        prop_assert_eq!(warnings, vec![]);
        prop_assert_eq!(again, config);
    }
}
