//! The time for which a directory subPath is empty at an update: from the kubelet's removal of the
//! old directory to the refresh. `cargo test -p bindguard-integration --test
//! window_of_a_directory_by_hand -- --ignored --nocapture` prints it.

use bindguard_integration::prelude::*;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_cri::v1::MountPropagation::PropagationPrivate;

const UPDATES: usize = 200;
const SLEEP: [&str; 2] = ["sleep", "1000000"];

#[test]
#[ignore = "a measurement"]
fn window_of_a_directory() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let _agent = Agent::start(node, "")?;
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-window")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &payload("0"))?;
    let mounts = [
        mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        ),
        mount(
            volume.subpath("app", 1, "folder").bind()?,
            "/etc/folder",
            PropagationPrivate,
        ),
    ];
    let sandbox = cri.run_annotated_pod(
        "runc",
        "window",
        pod.uid(),
        &[("bindguard.io/refresh", "true")],
    )?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let key = format!("/proc/{}/root/etc/folder/key", cri.pid(&app)?);
    let is_over = AtomicBool::new(false);
    let windows = thread::scope(|scope| {
        let reader = scope.spawn(|| windows(&key, &is_over));
        let updated = (1..=UPDATES).try_for_each(|number| {
            let text = number.to_string();
            volume.update(&payload(&text))?;
            until("the container reads the new folder", || {
                Ok(fs::read_to_string(&key).is_ok_and(|it| it == text))
            })?;
            // Until the agent is idle again.
            thread::sleep(Duration::from_millis(50));
            Ok(())
        });
        is_over.store(true, Ordering::Relaxed);
        let windows = reader.join().ok().context("the reader panicked");
        updated.and(windows)
    })?;
    ensure!(!windows.is_empty(), "no window was seen");
    let at = |share: usize| windows[(windows.len() - 1) * share / 100].as_micros();
    println!(
        "{} windows in {UPDATES} updates, us: {} {} {}",
        windows.len(),
        at(50),
        at(90),
        at(100)
    );
    cri.remove_pod(&sandbox)
}

fn payload(text: &str) -> [(&str, &str); 2] {
    [("app.conf", text), ("folder/key", text)]
}

/// The times without the file, sorted.
fn windows(key: &str, is_over: &AtomicBool) -> Vec<Duration> {
    let (mut windows, mut since) = (Vec::new(), None::<Instant>);
    while !is_over.load(Ordering::Relaxed) {
        match (fs::metadata(key), since) {
            (Err(error), None) if error.kind() == ErrorKind::NotFound => {
                since = Some(Instant::now())
            }
            (Ok(_), Some(began)) => {
                windows.push(began.elapsed());
                since = None;
            }
            _ => {}
        }
    }
    windows.sort_unstable();
    windows
}
