//! The kernel kills a process of a container for lack of memory: exactly one TaskOOM comes, before
//! the TaskExit.

use bindguard_integration::prelude::*;
use bindguard_integration::{events, on_every_generation_with_systemd};

on_newest_and_older!(|generation| Setup::on(generation).story(story));

on_every_generation_with_systemd!(|setup: Setup| setup.story(story));

fn story(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    let seen = events::during(node, || {
        let greedy = ctr
            .container("greedy")
            .argument("--memory-limit")
            .argument("16777216");
        greedy.runs(&["tail", "/dev/zero"]).start()?.success()?;
        ctr.wait_for_status("greedy", "STOPPED")?;
        ctr.remove("greedy")
    })?;
    let at = |word: &str| {
        seen.iter()
            .position(|event| event == word)
            .with_context(|| format!("no {word:?} in {seen:?}"))
    };
    ensure!(
        at("oom greedy")? < at("exit greedy greedy 137")?,
        "{seen:?}"
    );
    ensure!(
        seen.iter().filter(|event| *event == "oom greedy").count() == 1,
        "reported more than once: {seen:?}"
    );
    Ok(())
}
