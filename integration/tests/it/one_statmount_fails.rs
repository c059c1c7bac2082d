//! Each single statmount(2) of an admission fails once: for want of memory or descriptors, under a
//! filter that does not know the call, or with an answer that is too long. The mount table says the
//! same, so the stale subpath is repaired in that very create, and what is current is neither
//! called stale nor touched.
//!
//! `every_syscall_fails_once.rs` tests the other calls; strace(1) is usually older than
//! statmount(2).

use bindguard_integration::image::busybox;
use bindguard_integration::journal::lines;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;
use bindguard_integration::stale::StaleBundle;
use nix::libc;

/// Linux 6.8's, on every architecture; the C library does not name it yet.
const SYS_STATMOUNT: libc::c_long = 457;

const ERRORS: [(&str, i32); 6] = [
    ("EBUSY", libc::EBUSY),
    ("ENOMEM", libc::ENOMEM),
    ("EPERM", libc::EPERM),
    ("EMFILE", libc::EMFILE),
    ("ENOSYS", libc::ENOSYS),
    ("EOVERFLOW", libc::EOVERFLOW),
];

#[test]
fn a_stale_source_is_repaired_and_a_current_one_stays() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    if cfg!(not(target_arch = "x86_64")) {
        privilege::skipped("a single call is denied on x86_64 only");
        return Ok(());
    }
    denials_bite(node)?;
    let mut stale = StaleBundle::lay_out(node, "statmount")?;
    stale.begin_anew()?;
    let calls = calls(&denied(&stale, 0, 0)?)?;
    if calls == 0 {
        privilege::skipped("this kernel has no statmount");
        return stale.delete();
    }
    ensure!(calls > 2, "a re-bind makes {calls} calls only");
    for (error, number) in ERRORS {
        for call in 1..=calls {
            let what = format!("statmount number {call} says {error}");
            stale.begin_anew()?;
            went_on(&denied(&stale, number, call)?).with_context(|| what.clone())?;
            stale
                .is_repaired()
                .with_context(|| format!("what is stale, {what}"))?;
            stale.next_create().with_context(|| what.clone())?;
            went_on(&denied(&stale, number, call)?)?;
            is_left(&stale).with_context(|| format!("what is current, {what}"))?;
        }
    }
    eprintln!("{calls} calls failed in turn");
    stale.delete()
}

/// The guard with the `call`th statmount(2) denied; 0 denies none.
fn denied(stale: &StaleBundle<'_>, errno: i32, call: u32) -> Result<Finished> {
    let words = [
        SYS_STATMOUNT.to_string(),
        errno.to_string(),
        call.to_string(),
    ];
    let [syscall, errno, call] = &words;
    run(stale.guard(&[env!("CARGO_BIN_EXE_denied_once"), syscall, errno, call])?)
}

fn denials_bite(node: &Node) -> Result<()> {
    let [openat, busy] = [libc::SYS_openat.to_string(), libc::EBUSY.to_string()];
    for (call, is_denied) in [("1", true), ("2", false)] {
        let mut cat = node.command(env!("CARGO_BIN_EXE_denied_once"))?;
        cat.args([&openat, &busy, call])
            .arg(busybox()?)
            .args(["cat", "/proc/version"]);
        let ended = run(cat)?;
        ensure!(
            ended.status.success() != is_denied,
            "open number {call} of one: {ended:?}"
        );
        ensure!(
            ended.stderr.contains("busy") == is_denied,
            "open number {call} of one: {ended:?}"
        );
    }
    Ok(())
}

/// The number of calls.
fn calls(ended: &Finished) -> Result<u32> {
    let said = ended
        .stderr
        .lines()
        .find_map(|line| line.strip_prefix("denied_once: ")?.strip_suffix(" calls"));
    said.with_context(|| format!("no count: {ended:?}"))?
        .parse()
        .context("a number of calls")
}

fn went_on(ended: &Finished) -> Result<()> {
    ensure!(
        ended.status.success() && !ended.stderr.contains("panicked"),
        "the runtime was not reached: {ended:?}"
    );
    Ok(())
}

/// The subpath's line of the last create says that it is current.
fn is_left(stale: &StaleBundle<'_>) -> Result<()> {
    let last = lines(JOURNAL)?.pop().context("the journal is empty")?;
    let binds = last["binds"].as_array().context("a line has binds")?;
    let path = stale.subpath().target().to_str();
    let bind = binds
        .iter()
        .find(|bind| bind["source"].as_str() == path)
        .context("the report has the subpath")?;
    ensure!(bind["verdict"] == "current", "{bind}");
    stale.is_repaired()
}
