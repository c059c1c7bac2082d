//! The queries of the Grafana dashboard and of the alert rules: a real agent has each figure with
//! its labels, Prometheus' own tool can parse each query, and the first row gives the right numbers.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use bindguard_integration::doc_commands::repository;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;

/// The title of the panel, the legend, and the query, as Grafana sends it for all nodes.
type Query = (String, String, String);

fn queries() -> Result<Vec<Query>> {
    let file = repository().join("config/prometheus/dashboard.json");
    let dashboard: Value = serde_json::from_slice(&fs::read(file)?)?;
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().context("panels")? {
        let Some(targets) = panel["targets"].as_array() else {
            continue;
        };
        for target in targets {
            let word = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
            let query = word(target, "expr").replace("$node", ".*");
            queries.push((word(panel, "title"), word(target, "legendFormat"), query));
        }
    }
    ensure!(queries.len() > 40, "{queries:?}");
    Ok(queries)
}

/// The names of the figures in a text, with the labels of their matchers.
fn figures(text: &str) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("bindguard_") {
        let rest = &text[at..];
        let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        found.insert((name.to_owned(), String::new()));
        let inside = rest.strip_prefix('{').and_then(|it| it.split('}').next());
        for matcher in inside.unwrap_or_default().split(',') {
            let label = matcher.split(['=', '!']).next().unwrap_or_default().trim();
            if label != "instance" {
                found.insert((name.to_owned(), label.to_owned()));
            }
        }
    }
    found
}

#[test]
fn a_real_agent_has_each_figure_and_label() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        // the installer's pod counts changes of the node in this file
        fs::write("/run/bindguard/drift-count", "0\n")?;
        let pod = node.kubelet().pod("uid-web")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        volume.subpath("app", 0, "app.conf").bind()?;
        let agent = Agent::start(node, "")?;
        until("the agent counts the installation and its survey", || {
            let text = agent.get("/metrics");
            let counted = ["bindguard_node_drift{", "bindguard_sources{"];
            Ok(counted.iter().all(|figure| text.contains(figure)))
        })?;
        let text = agent.get("/metrics");
        let has = |name: &str, label: &str| {
            text.lines().any(|line| {
                let is_it = line.split(['{', ' ']).next() == Some(name);
                is_it && (label.is_empty() || line.contains(&format!("{label}=\"")))
            })
        };
        let rules = fs::read_to_string(repository().join("config/prometheus/rules.yaml"))?;
        let mut named = String::new();
        for line in rules.lines() {
            if let Some(query) = line.trim_start().strip_prefix("expr: ") {
                named += &format!("{query}\n");
            }
        }
        for (_, _, query) in queries()? {
            named += &format!("{query}\n");
        }
        let named = figures(&named);
        ensure!(named.len() > 40, "{named:?}");
        for (name, label) in named {
            ensure!(has(&name, &label), "no {name} with {label}:\n{text}");
        }
        pod.delete()
    });
}

/// As the test of the rules.
fn promtool() -> Option<PathBuf> {
    let named = std::env::var_os("BINDGUARD_PROMTOOL").map(PathBuf::from);
    let found = named.or_else(|| privilege::has_program("promtool").then(|| "promtool".into()));
    if found.is_none() {
        privilege::skipped("no promtool");
    }
    found
}

/// Nodes: a is guarded, repaired a create and has a stale subPath; b has no guard; c has the plugin
/// alone; d has gone.
const SERIES: &str = r#"
      - {series: 'up{job="b", instance="a"}', values: "1x120"}
      - {series: 'up{job="b", instance="d"}', values: "1x20 0x100"}
      - {series: 'bindguard_build_info{job="b", instance="a", version="1"}', values: "1x120"}
      - {series: 'bindguard_build_info{job="b", instance="d", version="1"}', values: "1x20 _x100"}
      - {series: 'bindguard_guarded_runtimes{job="b", instance="a"}', values: "1x120"}
      - {series: 'bindguard_guarded_runtimes{job="b", instance="b"}', values: "0x120"}
      - {series: 'bindguard_guarded_runtimes{job="b", instance="c"}', values: "0x120"}
      - {series: 'bindguard_nri_connected{job="b", instance="a"}', values: "0x120"}
      - {series: 'bindguard_nri_connected{job="b", instance="b"}', values: "0x120"}
      - {series: 'bindguard_nri_connected{job="b", instance="c"}', values: "1x120"}
      - {series: 'bindguard_sources{job="b", instance="a", kind="subpath", verdict="stale"}', values: "2x120"}
      - {series: 'bindguard_sources{job="b", instance="a", kind="subpath", verdict="current"}', values: "9x120"}
      - {series: 'bindguard_admission_binds_total{job="b", instance="a", verdict="stale", outcome="rebound"}', values: "_x60 3x60"}
      - {series: 'bindguard_admission_binds_total{job="b", instance="a", verdict="stale", outcome="none"}', values: "_x60 5x60"}
      - {series: 'bindguard_missing_files{job="b", instance="c"}', values: "1x120"}
      - {series: 'bindguard_node_drift{job="b", instance="c"}', values: "2x120"}
"#;

/// The panel, the legend, and the sample after two hours: labels and value.
const NUMBERS: [(&str, &str, &str, u32); 11] = [
    ("Is every node guarded?", "guarded", "{}", 2),
    ("Is every node guarded?", "not guarded", "{}", 1),
    ("Is every node guarded?", "no answer", "{}", 1),
    ("Is every node guarded?", "restart owed", "{}", 0),
    ("What is stale or dead now?", "stale", "{}", 2),
    ("What is stale or dead now?", "dead or not mounted", "{}", 0),
    ("What was repaired in 24 hours?", "before a create", "{}", 3),
    ("What was repaired in 24 hours?", "failed", "{}", 0),
    ("What was refused in 24 hours?", "refused", "{}", 0),
    (TABLE, "stale", r#"{instance="a"}"#, 2),
    (TABLE, "damage", r#"{instance="c"}"#, 3),
];
const TABLE: &str = "Nodes that need attention, or were repaired";

#[test]
fn prometheus_parses_each_query_and_the_first_row_is_right() -> Result<()> {
    let Some(promtool) = promtool() else {
        return Ok(());
    };
    let folder = std::env::temp_dir().join(format!("bindguard-queries-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let queries = queries()?;
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (number, (_, _, query)) in queries.iter().enumerate() {
        writeln!(
            rules,
            "      - record: query:{number}\n        expr: '{query}'"
        )?;
    }
    fs::write(folder.join("rules.yaml"), rules)?;
    check(&promtool, &folder, ["check", "rules", "rules.yaml"])?;

    let mut tests = format!(
        "rule_files: []\nevaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:{SERIES}    promql_expr_test:\n"
    );
    for (title, legend, labels, value) in NUMBERS {
        let mut found = queries.iter();
        let query = found.find(|query| query.0 == title && query.1 == legend);
        let (_, _, query) = query.with_context(|| format!("{title}: {legend}"))?;
        writeln!(tests, "      - expr: '{query}'\n        eval_time: 115m")?;
        writeln!(tests, "        exp_samples:")?;
        writeln!(tests, "          - {{labels: '{labels}', value: {value}}}")?;
    }
    fs::write(folder.join("tests.yaml"), tests)?;
    check(&promtool, &folder, ["test", "rules", "tests.yaml"])?;
    fs::remove_dir_all(&folder).context("remove the folder")
}

fn check(promtool: &Path, folder: &Path, words: [&str; 3]) -> Result<()> {
    let mut command = Command::new(promtool);
    command.current_dir(folder).args(words);
    run(command)?.success().map(drop)
}
