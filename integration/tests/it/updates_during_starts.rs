//! A configMap that never rests: an update every 2 ms while containers start in sequence, 50 in
//! `make test` and 200 in `make soak`.
//!
//! Every container starts and reads content that was current during the create. No reader ever sees
//! the empty file underneath the subpath's mount. No mount and no timestamp directory is left.

use bindguard_integration::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bindguard_integration::{Ctr, PollingReader, mounts};
use bindguard_testing::rounds;

#[test]
fn containers_under_updates() {
    Setup::on(Generation::NEWEST).story(|node| story(node, rounds(50, 200)));
}

fn story(node: &Node, containers: usize) -> Result<()> {
    // Between attach and detach, for some microseconds, the file under the new mount cannot be
    // unlinked: the kernel answers EBUSY. An update in that moment cannot remove the old directory,
    // and the guard removes the directory. With an update every 2 ms this happens in 1 % of the
    // creates, or if the guard loses its processor there. A kubelet updates once a minute at most.
    let may_meet = containers as u64 / 10;
    let before = mounts::table()?.len();
    let pod = node.kubelet().pod("storm")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
    let subpath = volume.subpath("app", 0, "count");
    let source = Bind::new(subpath.bind()?, "/etc/count");
    let (ctr, weather) = (node.ctr(), Weather::default());
    let reader = PollingReader::start(subpath.target());

    let ended = thread::scope(|scope| {
        let storm = scope.spawn(|| weather.blow(&volume));
        let ended =
            (0..containers).try_for_each(|number| one_container(&ctr, number, &source, &weather));
        weather.over.store(true, Ordering::Relaxed);
        storm
            .join()
            .map_err(|_| anyhow::anyhow!("the storm's thread panicked"))?
            .context("update the volume")?;
        ended
    });
    let seen = reader.stop();
    ended?;

    ensure!(
        seen.empty == 0 && seen.failed == 0 && seen.reads > 1000,
        "a reader saw the file underneath: {seen:?}"
    );
    let busy = weather.busy.load(Ordering::Relaxed);
    eprintln!(
        "{} updates, {busy} met a swap; {seen:?}",
        weather.current.load(Ordering::Relaxed)
    );
    ensure!(
        busy <= may_meet,
        "{busy} updates could not remove their old directory"
    );
    ensure!(
        volume.timestamp_directories()? == 1,
        "{} timestamp directories",
        volume.timestamp_directories()?
    );
    // the last container's mount may be stale by now; the next create makes the mount current again
    one_container(&ctr, containers, &source, &weather)?;
    only_a_current_mount(&subpath)?;
    pod.delete()?;
    ensure!(
        mounts::table()?.len() == before,
        "{before} mounts before, {} after",
        mounts::table()?.len()
    );
    Ok(())
}

fn one_container(ctr: &Ctr, number: usize, source: &Bind, weather: &Weather) -> Result<()> {
    let earliest = weather.current.load(Ordering::Acquire);
    let container = ctr
        .container(&format!("c{number}"))
        .mount(source.clone())
        .runs(&["sh", "-c", "echo -n read:; cat /etc/count"]);
    let words = container
        .run_to_end()?
        .success()
        .with_context(|| format!("container {number}"))?;
    let content = words
        .strip_prefix("read:")
        .with_context(|| format!("container {number} said {words:?}"))?;
    let latest = weather.current.load(Ordering::Acquire) + 1;
    let count: u64 = content
        .parse()
        .with_context(|| format!("container {number} read {content:?}"))?;
    ensure!(
        (earliest..=latest).contains(&count),
        "container {number} read {count}, current were {earliest} to {latest}"
    );
    Ok(())
}

/// The updates: `current` is the last update that is in the volume for sure.
#[derive(Default)]
struct Weather {
    current: AtomicU64,
    busy: AtomicU64,
    over: AtomicBool,
}

impl Weather {
    fn blow(&self, volume: &Volume) -> Result<()> {
        while !self.over.load(Ordering::Relaxed) {
            let next = self.current.load(Ordering::Relaxed) + 1;
            match volume.update(&[("count", &next.to_string())]) {
                // the update is in place; only the removal of the old directory met a mount on its
                // file
                Err(error) if is_busy(&error) => self.busy.fetch_add(1, Ordering::Relaxed),
                done => done.map(|()| 0)?,
            };
            self.current.store(next, Ordering::Release);
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

fn is_busy(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::ResourceBusy)
}
