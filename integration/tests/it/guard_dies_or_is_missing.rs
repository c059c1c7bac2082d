//! No guard at all: it is killed before its first check, or was never installed. Containers start
//! anyway.

use bindguard_integration::prelude::*;

#[test]
fn killed_at_its_start() {
    Setup::on(Generation::NEWEST).fault("start").story(|node| {
        starts_and_says(node, "the guard did not hand over")?;
        is_recorded(node, "died")
    });
}

#[test]
fn not_installed() {
    Setup::on(Generation::V1_7).story(|node| {
        let guard = node.programs().join(GUARD);
        fs::remove_file(&guard).with_context(|| format!("remove {}", guard.display()))?;
        starts_and_says(node, "is not installed")?;
        is_recorded(node, "missing")
    });
}

fn starts_and_says(node: &Node, words: &str) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("orphan")
        .mount(Bind::new("/usr", "/mnt"))
        .start()?
        .success()?;
    ensure!(ctr.exec("orphan", &["test", "-d", "/mnt/bin"])?.code() == 0);
    ctr.remove("orphan")?;
    node.wait_for_log("that there was no guard", |line| line.contains(words))
}

/// The shim's log is containerd's: the journal has the create, too, with the names of the bundle.
fn is_recorded(node: &Node, reason: &str) -> Result<()> {
    until("the journal has the create", || {
        let ended = node.bindguard(["journal", "--json"])?;
        let journal: Value = serde_json::from_str(&ended.stdout)?;
        let unchecked = journal["admissions"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|line| line["id"] == "orphan");
        Ok(unchecked.is_some_and(|line| {
            line["unchecked"] == reason && line["problems"].to_string().contains("no guard checked")
        }))
    })
}
