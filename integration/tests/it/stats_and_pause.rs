//! `ctr task metrics`, `ps`, `pause` and `resume`, and limits that were set at the start: as with
//! the stock shim.

use bindguard_integration::on_every_generation_with_systemd;
use bindguard_integration::prelude::*;

const LIMIT: u64 = 64 * 1024 * 1024;

on_newest_and_older!(|generation| Setup::on(generation).story(compare));

on_every_generation_with_systemd!(|setup: Setup| setup.story(compare));

fn compare(node: &Node) -> Result<()> {
    let [stock, ours] = [Runtime::Stock, Runtime::Bindguard].map(|runtime| story(node, runtime));
    let (stock, ours) = (stock?, ours?);
    ensure!(
        stock == ours,
        "other figures: {stock:?} with the stock shim, {ours:?} with ours"
    );
    Ok(())
}

/// Pauses a container and returns the names of its figures in `ctr`.
fn story(node: &Node, runtime: Runtime) -> Result<Vec<String>> {
    let ctr = node.ctr();
    let task = |words: &[&str]| run(ctr.command(&[&["task"], words].concat()));
    let pid_file = node.disk().join("pid");
    let (limit, file) = (LIMIT.to_string(), pid_file.display().to_string());
    let container = ctr.container("limited").runtime(runtime);
    let container = container
        .argument("--memory-limit")
        .argument(&limit)
        .argument("--pid-file")
        .argument(&file);
    container.start()?.success()?;
    let pid: u32 = fs::read_to_string(&pid_file)?
        .trim()
        .parse()
        .context("parse the pid file")?;
    ensure!(
        pid == ctr.pid("limited")?,
        "{runtime:?}: the pid file says {pid}"
    );

    let metrics = task(&["metrics", "limited"])?.success()?;
    ensure!(
        metrics.contains(&limit),
        "{runtime:?}: no limit of {limit} in {metrics}"
    );
    ensure!(
        task(&["ps", "limited"])?
            .success()?
            .contains(&pid.to_string())
    );
    task(&["pause", "limited"])?.success()?;
    ctr.wait_for_status("limited", "PAUSED")?;
    ensure!(
        task(&["pause", "limited"])?
            .failure()?
            .contains("cannot pause a"),
        "{runtime:?}: paused twice"
    );
    ensure!(
        ctr.exec("limited", &["true"])?
            .failure()?
            .contains("cannot exec in a")
    );
    task(&["resume", "limited"])?.success()?;
    ctr.wait_for_status("limited", "RUNNING")?;
    ensure!(ctr.exec("limited", &["true"])?.code() == 0);
    // a paused container can be killed
    task(&["pause", "limited"])?.success()?;
    ctr.kill("limited", "KILL")?;
    ctr.wait_for_status("limited", "STOPPED")?;
    ctr.remove("limited")?;
    Ok(metrics
        .lines()
        .skip(3)
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect())
}
