//! Prometheus' own tool reads the alert rules, runs their tests, and finds nothing to criticize in
//! the agent's figures.

use bindguard_integration::doc_commands::repository;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;
use bindguard_integration::process::{LIMIT, run_with_input};

/// `$BINDGUARD_PROMTOOL`, else the first on `PATH`; Debian has it in the package prometheus.
fn promtool() -> Option<PathBuf> {
    let named = std::env::var_os("BINDGUARD_PROMTOOL").map(PathBuf::from);
    let found = named.or_else(|| privilege::has_program("promtool").then(|| "promtool".into()));
    if found.is_none() {
        privilege::skipped("no promtool");
    }
    found
}

#[test]
fn the_rules_are_valid_and_their_tests_pass() -> Result<()> {
    let Some(promtool) = promtool() else {
        return Ok(());
    };
    let folder = repository().join("config/prometheus");
    for words in [
        ["check", "rules", "rules.yaml"],
        ["test", "rules", "rules_test.yaml"],
    ] {
        let mut command = Command::new(&promtool);
        command.current_dir(&folder).args(words);
        run(command)?.success()?;
    }
    Ok(())
}

#[test]
fn the_figures_follow_the_conventions() {
    let Some(promtool) = promtool() else { return };
    Setup::on(Generation::NEWEST).story(|node| {
        let agent = Agent::start(node, "")?;
        let answer = agent.get("/metrics");
        let Some((_, figures)) = answer.split_once("\r\n\r\n") else {
            anyhow::bail!("no figures: {answer}")
        };
        let mut command = Command::new(&promtool);
        command.args(["check", "metrics"]);
        let checked = run_with_input(command, &as_prometheus_text(figures), LIMIT)?;
        ensure!(
            checked.status.success(),
            "{}{}",
            checked.stdout,
            checked.stderr
        );
        Ok(())
    });
}

/// A scraper that takes no OpenMetrics gets Prometheus' own text format, which promtool reads as it
/// is. HEAD has the head of the answer alone.
#[test]
fn the_answer_is_of_the_kind_that_the_client_takes() {
    Setup::on(Generation::NEWEST).story(|node| {
        let agent = Agent::start(node, "")?;
        let kind = |answer: &str| {
            let mut lines = answer.lines();
            let line = lines.find_map(|line| line.strip_prefix("content-type: "));
            line.unwrap_or_default().to_owned()
        };
        let open = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
        for headers in ["", "Accept: */*\r\n", open] {
            let answer = agent.request("GET", "/metrics", headers);
            ensure!(
                kind(&answer).starts_with("application/openmetrics-text")
                    && answer.ends_with("# EOF\n"),
                "{headers}: {answer}"
            );
        }
        let plain = agent.request("GET", "/metrics", "Accept: text/plain\r\n");
        ensure!(
            kind(&plain) == "text/plain; version=0.0.4; charset=utf-8",
            "{plain}"
        );
        let (_, figures) = plain.split_once("\r\n\r\n").unwrap_or_default();
        ensure!(
            figures.contains("# TYPE bindguard_subpath_rebinds_total counter")
                && !figures.contains("# EOF"),
            "{figures}"
        );
        if let Some(promtool) = promtool() {
            let mut command = Command::new(&promtool);
            command.args(["check", "metrics"]);
            run_with_input(command, figures, LIMIT)?.success()?;
        }
        let head = agent.request("HEAD", "/metrics", "");
        ensure!(
            head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
        let posted = agent.request("POST", "/metrics", "Content-Length: 0\r\n");
        ensure!(posted.starts_with("HTTP/1.1 405 "), "{posted}");
        Ok(())
    });
}

/// promtool reads the older text format, in which a counter's and an info's declaration have the
/// name of their sample.
fn as_prometheus_text(figures: &str) -> String {
    let declared = |line: &str| {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let name = words.get(2).cloned().unwrap_or_default();
        let sample = ["_total", "_info"].map(|suffix| format!("{name}{suffix}"));
        let is_sample = |sample: &&String| {
            figures
                .lines()
                .any(|line| line.split(['{', ' ']).next() == Some(sample))
        };
        if let (Some(sample), Some(word)) = (sample.iter().find(is_sample), words.get_mut(2)) {
            word.clone_from(sample);
        }
        words.join(" ").replace(" info", " gauge")
    };
    let lines = figures
        .lines()
        .filter(|line| !line.starts_with("# UNIT") && *line != "# EOF");
    let lines = lines.map(|line| {
        if line.starts_with("# ") {
            declared(line)
        } else {
            line.to_owned()
        }
    });
    lines.map(|line| line + "\n").collect()
}
