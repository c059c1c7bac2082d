//! The report for readers: tables in Markdown, plots, and the document that holds them.

mod document;
mod plot;
mod table;

use std::fs;

use anyhow::{Context, Result, ensure};
use bindguard_integration::doc_commands::repository;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::goals::{GOALS, Goal};
use crate::results::Results;
use document::Document;
use table::Table;

/// Writes figures.txt of this crate, the figures of docs/benchmarks.md and its plots, unless the
/// figures of a shim are missing.
pub fn write_documents(results: &Results) -> Result<()> {
    for shim in Candidate::SHIMS {
        let is_there = results.median(Figure::LifeCpu, shim, 0).is_some();
        ensure!(
            is_there,
            "{} was not measured: docs/benchmarks.md stays as it is",
            shim.title()
        );
    }
    let docs = repository().join("docs");
    let mut document = Document::open(docs.join("benchmarks.md"))?;
    document.fill("goals", &goals(results))?;
    document.fill("machine", &machine(results))?;
    document.save()?;
    let all = repository().join("integration/bench/figures.txt");
    fs::write(&all, figures(results)).with_context(|| format!("write {}", all.display()))?;
    plot::memory(results, &docs.join("benchmarks-memory.svg"))?;
    plot::create(results, &docs.join("benchmarks-create.svg"))
}

/// Every figure that was measured: figures down, candidates across. Figures without a peer have a
/// table of their own.
pub fn figures(results: &Results) -> String {
    let figures = results.figures();
    let is_here = |candidate: &Candidate| {
        let has = |figure: &Figure| {
            results
                .places(*figure)
                .into_iter()
                .any(|at| results.median(*figure, *candidate, at).is_some())
        };
        figures.iter().any(has)
    };
    let here: Vec<Candidate> = Candidate::ALL.into_iter().filter(is_here).collect();
    let titles = here.iter().map(|candidate| candidate.title().to_owned());
    let mut beside_peers = Table::new("medians", titles);
    let mut alone = Table::new("bindguard alone", ["median".to_owned()]);
    let mut some_are_alone = false;
    for figure in figures {
        for at in results.places(figure) {
            let median = |candidate: &Candidate| results.median(figure, *candidate, at);
            let of_peer = |candidate: &Candidate| {
                *candidate != Candidate::Bindguard && median(candidate).is_some()
            };
            if here.iter().any(of_peer) {
                let cells = here
                    .iter()
                    .map(|candidate| shown(figure, median(candidate)));
                beside_peers.row(named(figure, at), cells);
            } else {
                some_are_alone = true;
                alone.row(
                    named(figure, at),
                    [shown(figure, median(&Candidate::Bindguard))],
                );
            }
        }
    }
    if some_are_alone {
        format!("{beside_peers}\n{alone}")
    } else {
        beside_peers.to_string()
    }
}

/// The measured goals, with bindguard's figures.
pub fn goals(results: &Results) -> String {
    let mut table = Table::new(
        "figure",
        ["bindguard", "goal", "reached", "best peer", "ratio"].map(String::from),
    );
    for goal in GOALS.iter().filter(|goal| goal.ours(results).is_some()) {
        table.row(named(goal.figure, goal.at), of_goal(results, goal));
    }
    table.to_string()
}

fn of_goal(results: &Results, goal: &Goal) -> [String; 5] {
    let (ours, most) = (goal.ours(results), goal.most(results));
    let reached = ours.zip(most).map_or(
        "?",
        |(ours, most)| if ours <= most { "yes" } else { "**no**" },
    );
    let peer = goal.best_peer(results);
    let ratio = ours
        .zip(peer)
        .map(|(ours, (_, theirs))| ours / theirs)
        .filter(|ratio| ratio.is_finite());
    let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
    let peer = peer.map_or_else(
        || "-".to_owned(),
        |(peer, value)| format!("{} ({})", goal.figure.show(value), peer.title()),
    );
    [
        shown(goal.figure, ours),
        format!("≤ {}", shown(goal.figure, most)),
        reached.to_owned(),
        peer,
        ratio,
    ]
}

fn machine(results: &Results) -> String {
    let mut days: Vec<&str> = results
        .conditions
        .iter()
        .map(|condition| condition.day.as_str())
        .collect();
    days.dedup();
    let loads = || results.conditions.iter().map(|condition| condition.load);
    let (least, most) = (
        loads().fold(f64::INFINITY, f64::min),
        loads().fold(0.0, f64::max),
    );
    let when = [
        ("measured".to_owned(), days.join(", ")),
        (
            "load before the parts of the bench".to_owned(),
            format!("{least:.1} to {most:.1}"),
        ),
    ];
    let rows = when.iter().chain(&results.machine.0);
    rows.map(|(name, value)| format!("* {name}: {value}\n"))
        .collect()
}

fn named(figure: Figure, at: u64) -> String {
    let at = figure
        .over()
        .map_or_else(String::new, |what| format!(", {}", counted(at, what)));
    let unit = if figure.unit().is_empty() {
        ""
    } else {
        &format!(" ({})", figure.unit())
    };
    format!("{}{at}{unit}", figure.title())
}

/// `10,000 pods`, `1 pod`.
fn counted(number: u64, what: &str) -> String {
    let what = if number == 1 {
        what.trim_end_matches('s')
    } else {
        what
    };
    match (number / 1000, number % 1000) {
        (0, rest) => format!("{rest} {what}"),
        (thousands, rest) => format!("{thousands},{rest:03} {what}"),
    }
}

fn shown(figure: Figure, value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| figure.show(value))
}
