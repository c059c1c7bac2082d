//! The Grafana dashboard. Its rows answer an operator's questions, and the agent has each metric and
//! label of the queries and alert rules. The metrics come from the list in docs/agent.md, which a test
//! of the agent compares with the agent.

use std::collections::BTreeMap;

use bindguard_core::judge::VerdictName;
use bindguard_core::report::Outcome;
use serde_json::{Value, json};

use crate::kube::documents;

/// Labels that Prometheus adds, and the label of a histogram's buckets.
const ADDED: [&str; 3] = ["instance", "job", "le"];

fn panels() -> Vec<Value> {
    let dashboard: Value =
        serde_json::from_str(include_str!("../../prometheus/dashboard.json")).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let mut variables = variables.iter();
    assert!(variables.any(|it| it["name"] == "node" && it["includeAll"] == true));
    let panels = dashboard["panels"].as_array().unwrap().clone();
    panels
        .into_iter()
        .filter(|panel| panel["type"] != "row")
        .collect()
}

fn targets(panel: &Value) -> Vec<(String, String)> {
    let word = |target: &Value, key: &str| target[key].as_str().unwrap().to_owned();
    let targets = panel["targets"].as_array().unwrap().iter();
    targets
        .map(|target| (word(target, "expr"), word(target, "legendFormat")))
        .collect()
}

#[test]
fn the_first_row_answers_four_questions_and_a_table_names_the_nodes() {
    let panels = panels();
    let mut questions = Vec::new();
    for panel in &panels {
        assert!(panel["description"].as_str().unwrap().len() > 20, "{panel}");
        if panel["gridPos"]["y"] != 0 {
            continue;
        }
        questions.push(panel["title"].as_str().unwrap());
        assert_eq!(panel["type"], "stat");
        let steps = &panel["fieldConfig"]["defaults"]["thresholds"]["steps"];
        assert_eq!(steps[1], json!({"color": "red", "value": 1}), "{panel}");
        // A node that has no such sample is no empty field.
        for (expression, _) in targets(panel) {
            assert!(expression.contains("or vector(0)"), "{expression}");
        }
    }
    let asked = [
        "Is every node guarded?",
        "What is stale or dead now?",
        "What was repaired in 24 hours?",
        "What was refused in 24 hours?",
    ];
    assert_eq!(questions, asked);
    assert_eq!(panels[4]["type"], "table");
}

/// A fleet has thousands of nodes: a graph with a series for each of them shows nothing. The table
/// has a line only for a node with a value.
#[test]
fn graphs_show_the_chosen_nodes_and_no_series_for_each() {
    for panel in panels() {
        for (expression, legend) in targets(&panel) {
            let figures = expression.matches("bindguard_").count();
            let chosen = expression.matches("{instance=~\"$node\"").count();
            assert!(chosen >= figures && figures > 0, "{expression}");
            if panel["type"] == "table" {
                let is_by_node = expression.contains("by (instance) (");
                let has_limit = expression.ends_with("> 0") || expression.starts_with("count");
                assert!(is_by_node && has_limit, "{expression}");
                continue;
            }
            let expression = expression.trim_start_matches('(');
            let first = ["sum", "count", "histogram_quantile"];
            assert!(
                first.iter().any(|word| expression.starts_with(word)),
                "{expression}"
            );
            let is_by_node = expression.contains("by (instance") || legend.contains("instance");
            assert!(!is_by_node, "{expression} {legend}");
        }
    }
}

#[test]
fn each_query_names_figures_and_labels_of_the_agent() {
    let agent = Agent::read(include_str!("../../../docs/agent.md"));
    let mut wrong = Vec::new();
    let mut count = 0;
    for panel in panels() {
        for (expression, legend) in targets(&panel) {
            wrong.extend(agent.mistakes(&expression));
            for label in legend.split("{{").skip(1) {
                let label = label.split("}}").next().unwrap();
                let groups = grouping(&expression);
                if !groups.iter().any(|group| group == label) {
                    wrong.push(format!("{legend}: the result has no {label}"));
                }
            }
            count += 1;
        }
    }
    let rules = documents(include_str!("../../prometheus/rules.yaml"));
    for rule in rules[0]["groups"][0]["rules"].as_array().unwrap() {
        wrong.extend(agent.mistakes(rule["expr"].as_str().unwrap()));
        count += 1;
    }
    assert!(wrong.is_empty() && count > 50, "{count}: {wrong:#?}");
}

#[test]
fn a_wrong_name_is_found() {
    let agent = Agent::read(include_str!("../../../docs/agent.md"));
    for (query, mistake) in [
        ("sum(bindguard_nonsense{a=\"b\"})", "no bindguard_nonsense"),
        ("bindguard_refreshes", "no bindguard_refreshes"),
        ("bindguard_pinned_mounts_bucket", "no bindguard_pinned"),
        ("bindguard_sources{verdcit=\"stale\"}", "has no verdcit"),
        ("bindguard_sources{verdict=~\"stale|old\"}", "is never old"),
        ("bindguard_sources{kind=\"subPath\"}", "is never subPath"),
        (
            "bindguard_refreshes_total{outcome=\"key-gone\"}",
            "is never key-gone",
        ),
        (
            "bindguard_admission_binds_total{outcome=\"re-bound\"}",
            "is never re-bound",
        ),
        ("sum by (reason) (bindguard_events_total)", "by reason"),
    ] {
        let mistakes = agent.mistakes(query);
        assert!(
            mistakes.len() == 1 && mistakes[0].contains(mistake),
            "{query}: {mistakes:?}"
        );
    }
    let right = "sum by (le, job) (rate(bindguard_refresh_seconds_bucket{le=\"0.5\"}[5m]))";
    assert!(agent.mistakes(right).is_empty());
}

/// The labels of a figure, and the values that docs/agent.md lists.
struct Figure {
    labels: Vec<String>,
    values: Vec<String>,
}

/// The figures of the agent, by name.
struct Agent(BTreeMap<String, Figure>);

impl Agent {
    /// Reads lines such as: * `bindguard_name{label}`: help, by label: `value`, `value`
    fn read(page: &str) -> Self {
        let mut figures = BTreeMap::new();
        for line in page.lines() {
            let Some(line) = line.strip_prefix("* `bindguard_") else {
                continue;
            };
            let (head, help) = line.split_once("`: ").unwrap();
            let (name, labels) = head.split_once('{').unwrap_or((head, ""));
            let labels = labels.trim_end_matches('}').split(',');
            let values = help.split_once(", by ").map_or("", |(_, values)| values);
            let figure = Figure {
                labels: labels.map(str::to_owned).collect(),
                values: values
                    .split('`')
                    .skip(1)
                    .step_by(2)
                    .map(str::to_owned)
                    .collect(),
            };
            figures.insert(format!("bindguard_{name}"), figure);
        }
        assert!(figures.len() > 30);
        Self(figures)
    }

    fn figure(&self, name: &str) -> Option<&Figure> {
        let whole = name.strip_suffix("_bucket");
        match whole.filter(|whole| whole.ends_with("_seconds")) {
            Some(whole) => self.0.get(whole),
            None => self.0.get(name).filter(|_| !name.ends_with("_seconds")),
        }
    }

    /// The parts of a query that the agent does not have.
    fn mistakes(&self, query: &str) -> Vec<String> {
        let mut mistakes = Vec::new();
        let mut known: Vec<&str> = ADDED.into();
        for (name, matchers) in selectors(query) {
            let Some(figure) = self.figure(name) else {
                // The gauge of seconds is no histogram.
                if name != "bindguard_agent_last_survey_timestamp_seconds" {
                    mistakes.push(format!("no {name}"));
                }
                continue;
            };
            known.extend(figure.labels.iter().map(String::as_str));
            for (label, values) in matchers {
                if ADDED.contains(&label) {
                    continue;
                }
                if !figure.labels.iter().any(|it| it == label) {
                    mistakes.push(format!("{name} has no {label}"));
                    continue;
                }
                for value in values.split('|') {
                    if !is_value(figure, label, value) {
                        mistakes.push(format!("{label} of {name} is never {value}"));
                    }
                }
            }
        }
        if query.contains("label_replace(") || mistakes.iter().any(|it| it.starts_with("no ")) {
            return mistakes;
        }
        for label in grouping(query) {
            if !known.contains(&label.as_str()) {
                mistakes.push(format!("by {label}: {query}"));
            }
        }
        mistakes
    }
}

fn is_value(figure: &Figure, label: &str, value: &str) -> bool {
    if !figure.values.is_empty() {
        return figure.values.iter().any(|it| it == value);
    }
    match label {
        "verdict" => serde_json::from_value::<VerdictName>(json!(value)).is_ok(),
        "kind" => ["subpath", "volume", "host-root"].contains(&value),
        "outcome" if value == "none" => true,
        "outcome" => {
            let tagged = json!({"result": value.replace('_', "-")});
            let parsed = serde_json::from_value::<Outcome>(tagged);
            let is_unknown = |error: serde_json::Error| error.to_string().contains("variant");
            !value.contains('-') && !parsed.err().is_some_and(is_unknown)
        }
        _ => false,
    }
}

/// The figures of a query, and the matchers of each: the label, and its value.
fn selectors(query: &str) -> Vec<(&str, Vec<(&str, &str)>)> {
    let mut found = Vec::new();
    for (at, _) in query.match_indices("bindguard_") {
        let rest = &query[at..];
        let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        let mut matchers = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            for matcher in inside.split('}').next().unwrap().split(", ") {
                let (label, value) = matcher.split_once(['=', '!']).unwrap();
                matchers.push((label, value.trim_matches(['=', '~', '"'])));
            }
        }
        found.push((name, matchers));
    }
    found
}

/// The labels of `by (...)` and `on (...)`.
fn grouping(query: &str) -> Vec<String> {
    let mut labels = Vec::new();
    for word in ["by (", "on ("] {
        for part in query.split(word).skip(1) {
            let list = part.split(')').next().unwrap();
            labels.extend(list.split(',').map(|label| label.trim().to_owned()));
        }
    }
    labels
}
