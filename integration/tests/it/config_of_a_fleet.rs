//! The config of a fleet becomes the config of each node. A mistake changes no node, and
//! a file that was edited on a node is replaced only on request.

use bindguard_integration::prelude::*;
use std::time::UNIX_EPOCH;

use bindguard_integration::agent::{Agent, Form};

const CONFIG: &str = "/etc/bindguard/config.toml";
const REPORT: &str = "[checks]\nstale-subpaths = \"report\"\n";
const REPAIR: &str = "[agent]\nmetrics = \"off\"\nsocket = \"/run/bindguard-agent.sock\"\n[checks]\nstale-subpaths = \"repair\"\n";

#[test]
fn story() {
    Setup::on(Generation::V1_7).cri().bare().story(|node| {
        let fleet = Fleet(node);
        fleet.install(REPORT, &[])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        is(REPORT)?;
        let same = fleet.install(REPORT, &["--dry-run"])?.success()?;
        ensure!(same.contains("no file has to change"), "{same}");

        // report first, then repair
        ensure!(fleet.install(REPAIR, &["--dry-run"])?.code() == 1);
        is(REPORT)?;
        fleet.install(REPAIR, &[])?.success()?;
        is(REPAIR)?;

        let broken = fleet.install("[checks\n", &[])?;
        ensure!(
            broken.code() == 2 && broken.stderr.contains("line 1"),
            "{broken:?}"
        );
        is(REPAIR)?;
        the_fleet_makes_a_typing_mistake(&fleet)?;

        let edited = format!("# mine\n{REPAIR}");
        fs::write(CONFIG, &edited)?;
        for options in [&[][..], &["--dry-run"]] {
            let kept = fleet.install(REPORT, options)?;
            ensure!(
                kept.code() == 1 && kept.stdout.contains("was edited on this node"),
                "{options:?}: {kept:?}"
            );
            is(&edited)?;
        }
        let status = node.bindguard(["status"])?;
        ensure!(
            status
                .stdout
                .contains("is not the config that install was given"),
            "{status:?}"
        );
        fleet.install(REPORT, &["--force-node-config"])?.success()?;
        is(REPORT)?;
        let status = node.bindguard(["status"])?;
        ensure!(!status.stdout.contains("drift"), "{status:?}");

        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?.success()?;
        is(&edited).context("the file of the operator is back")
    });
}

/// A file that is older than bindguard is an operator's, too. Its key of another version keeps
/// bindguard neither from coming nor from going.
#[test]
fn a_file_from_before_the_installation_stays() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        fs::create_dir_all(Path::new(CONFIG).parent().context("a folder")?)?;
        let mine = "# mine\n[checks]\nof-a-newer-version = \"report\"\n";
        fs::write(CONFIG, mine)?;
        let kept = Fleet(node).install(REPORT, &[])?;
        ensure!(kept.code() == 1, "{kept:?}");
        is(mine)?;
        ensure!(
            node.containerd_files()?.contains("runtimes.bindguard"),
            "the runtime waits for the config"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?.success()?;
        is(mine)
    });
}

/// The fleet's config becomes what the node's file was before the first install.
#[test]
fn a_file_that_comes_back_keeps_its_time() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        fs::create_dir_all(Path::new(CONFIG).parent().context("a folder")?)?;
        fs::write(CONFIG, REPORT)?;
        let file = fs::File::options().write(true).open(CONFIG)?;
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1_000_000_000))?;
        let before = file.metadata()?.modified()?;
        let fleet = Fleet(node);
        fleet.install(REPAIR, &["--force-node-config"])?.success()?;
        ensure!(fs::metadata(CONFIG)?.modified()? != before);
        fleet.install(REPORT, &[])?.success()?;
        is(REPORT)?;
        let now = fs::metadata(CONFIG)?.modified()?;
        ensure!(now == before, "changed at {now:?}");
        Ok(())
    });
}

/// Neither the node nor its agent follows a text with an unknown key, and both are unready.
fn the_fleet_makes_a_typing_mistake(fleet: &Fleet<'_>) -> Result<()> {
    let mistaken = "[checks]\nstale-subpath = \"report\"\n";
    let said = "line 2: unknown key `checks.stale-subpath`";
    for options in [&["--dry-run"][..], &[], &["--force-node-config"]] {
        let kept = fleet.install(mistaken, options)?;
        ensure!(
            kept.code() == 1 && kept.stdout.contains(said),
            "{options:?}: {kept:?}"
        );
        is(REPAIR)?;
    }
    // the text for the agent has the node's kubelet before it
    let agent = Agent::start_as(fleet.0, mistaken, Form::Pod)?;
    let (ready, status) = (agent.get("/readyz"), agent.get("/v1/status"));
    ensure!(
        ready.starts_with("HTTP/1.1 503") && ready.contains("unknown key `checks.stale-subpath`"),
        "{ready}"
    );
    ensure!(status.contains("\"stale_subpaths\":\"repair\""), "{status}");
    Ok(())
}

struct Fleet<'n>(&'n Node);

impl Fleet<'_> {
    fn install(&self, config: &str, options: &[&str]) -> Result<Finished> {
        let file = self.0.disk().join("fleet.toml");
        fs::write(&file, config)?;
        let file = file.display().to_string();
        let words = ["install", "--node-config", &file];
        self.0.bindguard([&words[..], options].concat())
    }
}

fn is(wanted: &str) -> Result<()> {
    let present = fs::read_to_string(CONFIG).context("read the node's config")?;
    ensure!(present == wanted, "the node has {present:?}");
    Ok(())
}
