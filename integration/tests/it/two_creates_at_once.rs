//! Two containers of a pod with a stale subpath are created at once: both containers start, and the
//! subpath has exactly one mount at the end.

use bindguard_integration::prelude::*;
use bindguard_integration::{Ctr, PollingReader};

#[test]
fn both_start() {
    Setup::on(Generation::V1_7).story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("twins")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("round", "start")])?;
    let subpath = volume.subpath("app", 0, "round");
    let source = Bind::new(subpath.bind()?, "/etc/round");
    let reader = PollingReader::start(subpath.target());
    for round in 0..10 {
        let content = round.to_string();
        volume.update(&[("round", &content)])?;
        both_read(&node.ctr(), &source, &content)?;
        only_a_current_mount(&subpath)?;
    }
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0,
        "a reader saw the file underneath: {seen:?}"
    );
    ensure!(
        volume.timestamp_directories()? == 1,
        "a timestamp directory was stranded"
    );
    pod.delete()
}

fn both_read(ctr: &Ctr, source: &Bind, content: &str) -> Result<()> {
    thread::scope(|scope| {
        let twins = ["left", "right"].map(|side| {
            let container = ctr
                .container(&format!("{side}-{content}"))
                .mount(source.clone());
            scope.spawn(move || {
                container
                    .runs(&["cat", "/etc/round"])
                    .run_to_end()?
                    .success()
            })
        });
        for twin in twins {
            let read = twin
                .join()
                .map_err(|_| anyhow!("a creating thread panicked"))??;
            ensure!(read == content, "a twin of round {content} reads {read:?}");
        }
        Ok(())
    })
}
