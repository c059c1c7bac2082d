//! `make demo` shows what it says, and leaves nothing on the machine: not after its last line, not
//! after Ctrl-C, and not after a SIGKILL.

use bindguard_integration::prelude::*;
use bindguard_integration::privilege;
use bindguard_testing::rounds;

#[test]
fn as_it_says() -> Result<()> {
    if let Some(why) = privilege::missing() {
        privilege::skipped(&why);
        return Ok(());
    }
    let words = run(demo())?.success()?;
    ensure!(
        words.contains("What was observed") && !words.contains("NO\n"),
        "{words}"
    );
    Ok(())
}

#[test]
fn broken_off() -> Result<()> {
    if let Some(why) = privilege::missing() {
        privilege::skipped(&why);
        return Ok(());
    }
    let signals = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL];
    let moments = [300, 900, 1500, 2500, 5000].map(Duration::from_millis);
    let all = signals
        .iter()
        .flat_map(|signal| moments.map(|moment| (*signal, moment)));
    for (signal, moment) in all.step_by(rounds(2, 1)) {
        broken_off_by(signal, moment).with_context(|| format!("{signal} after {moment:?}"))?;
    }
    Ok(())
}

fn broken_off_by(signal: Signal, moment: Duration) -> Result<()> {
    let mut demo = demo()
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start the demo")?;
    let pid = demo.id();
    thread::sleep(moment);
    // on a fast machine it may be done: then there is nothing to break off
    let _ = kill(
        Pid::from_raw(pid.try_into().context("the demo's pid")?),
        signal,
    );
    demo.wait().context("wait for the demo")?;
    // a killed demo cannot wait for its keeper, nor can a demo that gets the signal too early
    let mut left = Vec::new();
    let gone = until("nothing is left behind", || {
        left = left_behind(pid)?;
        Ok(left.is_empty())
    });
    gone.with_context(|| format!("{left:?}"))
}

/// Folders, cgroups (and with them processes) and loop devices that carry the node's name.
fn left_behind(pid: u32) -> Result<Vec<PathBuf>> {
    let name = format!("bgt-{pid}-0");
    let hierarchies = Path::new("/sys/fs/cgroup")
        .read_dir()
        .context("list the cgroup hierarchies")?;
    let groups = hierarchies
        .flatten()
        .map(|hierarchy| hierarchy.path().join(&name));
    let places = groups.chain([
        Path::new("/var/cache").join(&name),
        Path::new("/sys/fs/cgroup").join(&name),
    ]);
    let mut left: Vec<PathBuf> = places.filter(|place| place.exists()).collect();
    let devices = Path::new("/sys/block")
        .read_dir()
        .context("list the block devices")?;
    for device in devices.flatten() {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        if file.contains(&name) {
            left.push(device.path());
        }
    }
    Ok(left)
}

fn demo() -> Command {
    Command::new(env!("CARGO_BIN_EXE_demo"))
}
