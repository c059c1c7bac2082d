//! The figures in Prometheus' text format, for clients that do not take OpenMetrics.
//!
//! The library writes OpenMetrics alone. The two differ in the declarations: the older format
//! declares a counter by the name of its samples, and knows no units, no infos and no end.

use std::collections::HashSet;

/// The same figures in text format 0.0.4.
pub fn plain_text(open_metrics: &str) -> String {
    let samples: HashSet<&str> = open_metrics
        .lines()
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        match declaration(line) {
            None => text.push_str(line),
            Some((word, name, rest)) => {
                let sample = ["_total", "_info"]
                    .map(|suffix| format!("{name}{suffix}"))
                    .into_iter()
                    .find(|sample| samples.contains(sample.as_str()));
                let rest = if rest == "info" { "gauge" } else { rest };
                let name = sample.as_deref().unwrap_or(name);
                text.push_str(&format!("# {word} {name} {rest}"));
            }
        }
        text.push('\n');
    }
    text
}

/// The word, the name and the rest of a line that declares a figure.
fn declaration(line: &str) -> Option<(&str, &str, &str)> {
    let mut words = line.strip_prefix("# ")?.splitn(3, ' ');
    Some((words.next()?, words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_infos_are_declared_by_their_samples() {
        let text = plain_text(
            "# HELP b_creates Creates.\n# TYPE b_creates counter\nb_creates_total{a=\"x\"} 1\n\
             # HELP b_build About.\n# TYPE b_build info\nb_build_info{version=\"1\"} 1\n\
             # HELP b_wait_seconds Time.\n# TYPE b_wait_seconds gauge\n# UNIT b_wait_seconds seconds\nb_wait_seconds 2\n# EOF\n",
        );
        assert_eq!(
            text,
            "# HELP b_creates_total Creates.\n# TYPE b_creates_total counter\nb_creates_total{a=\"x\"} 1\n\
             # HELP b_build_info About.\n# TYPE b_build_info gauge\nb_build_info{version=\"1\"} 1\n\
             # HELP b_wait_seconds Time.\n# TYPE b_wait_seconds gauge\nb_wait_seconds 2\n"
        );
    }
}
