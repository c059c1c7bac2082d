//! What was measured, for people: tables in Markdown.

mod table;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::goals::{GOALS, Goal};
use crate::results::Results;
use table::Table;

/// A table for each figure that was measured: candidates down, numbers across.
pub fn tables(results: &Results) -> String {
    results.figures().into_iter().map(|figure| of_figure(results, figure)).collect::<Vec<_>>().join("\n")
}

fn of_figure(results: &Results, figure: Figure) -> String {
    let places = results.places(figure);
    let unit = if figure.unit().is_empty() { "" } else { &format!(", {}", figure.unit()) };
    let heading = |place: &u64| figure.columns().map_or_else(|| "median".to_owned(), |what| format!("{place} {what}"));
    let mut table = Table::new(format!("{}{unit}", figure.title()), places.iter().map(heading));
    for candidate in Candidate::ALL {
        let medians: Vec<Option<f64>> = places.iter().map(|at| results.median(figure, candidate, *at)).collect();
        if medians.iter().any(Option::is_some) {
            table.row(candidate.title().to_owned(), medians.into_iter().map(|value| shown(figure, value)));
        }
    }
    table.to_string()
}

/// The goals of which something was measured, with what was reached.
pub fn goals(results: &Results) -> String {
    let columns = ["bindguard", "goal", "reached", "best peer", "ratio"].map(String::from);
    let mut table = Table::new("figure".to_owned(), columns);
    for goal in GOALS.iter().filter(|goal| goal.ours(results).is_some()) {
        table.row(named(goal), of_goal(results, goal));
    }
    table.to_string()
}

fn named(goal: &Goal) -> String {
    let at = goal.figure.columns().map_or_else(String::new, |what| format!(", {} {what}", goal.at));
    let unit = if goal.figure.unit().is_empty() { "" } else { &format!(" ({})", goal.figure.unit()) };
    format!("{}{at}{unit}", goal.figure.title())
}

fn of_goal(results: &Results, goal: &Goal) -> [String; 5] {
    let (ours, most) = (goal.ours(results), goal.most(results));
    let reached = ours.zip(most).map_or("?", |(ours, most)| if ours <= most { "yes" } else { "**no**" });
    let peer = goal.best_peer(results);
    let ratio = ours.zip(peer).map(|(ours, (_, theirs))| ours / theirs).filter(|ratio| ratio.is_finite());
    let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
    let peer =
        peer.map_or_else(|| "-".to_owned(), |(peer, value)| format!("{} ({})", goal.figure.show(value), peer.title()));
    [shown(goal.figure, ours), format!("≤ {}", shown(goal.figure, most)), reached.to_owned(), peer, ratio]
}

fn shown(figure: Figure, value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| figure.show(value))
}
