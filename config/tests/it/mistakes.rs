//! A mistake in `config.toml` changes the key that has it, and no other key.

use std::collections::BTreeMap;

use bindguard_config::Config;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

/// Every key, with values that are not its default.
const VALUES: [(&str, &[&str]); 29] = [
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
            prop_assert!(other == name || before[other] == value, "{other} became {value} by a change of {name}");
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
            prop_assert_eq!(&value, if other == name { &defaults[other] } else { &before[other] }, "{}", other);
        }
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
