//! Stale subpaths and volumes that are not mounted, right now.

use crate::node_report::NodeReport;

use super::Point;

const NAME: &str = "subpaths";

/// The point on them.
pub fn subpaths(report: &NodeReport) -> Point {
    let found: Vec<_> = report.binds.iter().filter(|bind| bind.is_finding()).collect();
    if let Some(first) = found.first() {
        let told = format!(
            "{} of {} are not as they should be: {} is {}",
            found.len(),
            report.looked_at,
            first.bind.source.display(),
            first.bind.verdict
        );
        return Point::bad(NAME, told, "bindguard diagnose");
    }
    match report.problems.first() {
        Some(problem) => Point::no_answer(NAME, problem.clone()),
        None => Point::good(NAME, format!("{} subpaths and volumes are as they should be", report.looked_at)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn what_could_not_be_looked_at_is_not_good() {
        let problems = vec!["list /x: no".to_owned()];
        assert_eq!(subpaths(&NodeReport { problems, ..NodeReport::default() }).state, State::NoAnswer);
        assert_eq!(subpaths(&NodeReport::default()).state, State::Good);
    }
}
