//! A guard and a kubelet since 1.19 repair a subpath at the same moment: the kubelet unmounts the
//! topmost mount and binds anew, at any step of the guard. The next create ends with a single
//! current mount.

use bindguard_integration::kubelet::Behaviour;
use bindguard_integration::prelude::*;
use bindguard_integration::stale::StaleBundle;

const MEETINGS: u32 = 100;

#[test]
fn next_create_finds_one_mount() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let mut stale = StaleBundle::lay_out(node, "both")?;
    let (mut kubelet_failed, mut doubled) = (0, 0);
    for meeting in 0..MEETINGS {
        stale.begin_anew()?;
        let mut guards = Vec::new();
        // two guards in every second round
        for _ in 0..1 + meeting % 2 {
            let mut guard = stale.guard(&[])?;
            guards.push(
                guard
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .context("start a guard")?,
            );
        }
        // somewhere in the guard's few milliseconds
        thread::sleep(Duration::from_micros(200) * meeting);
        // a real kubelet reports the failure, and tries again with the container's next start
        kubelet_failed += u32::from(stale.subpath().bind_again(Behaviour::Since1_19).is_err());
        for mut guard in guards {
            let ended = guard.wait().context("wait for a guard")?;
            ensure!(
                ended.success(),
                "meeting {meeting}: the runtime was not reached: {ended}"
            );
        }
        doubled += u32::from(stale.subpath().mounts()?.len() > 1);
        stale
            .next_create()
            .with_context(|| format!("meeting {meeting}"))?;
    }
    eprintln!(
        "{MEETINGS} meetings: the kubelet failed in {kubelet_failed}, two mounts were left by {doubled}"
    );
    stale.delete()
}
