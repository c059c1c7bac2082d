use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use bindguard_testing::held_memory::{Executing, Holder, blocks_readers, unless_it_hangs};

use super::*;

#[test]
fn only_plain_paths_from_the_top() {
    assert_eq!(
        below_the_root("/kubepods/burstable/web"),
        Some(Path::new("kubepods/burstable/web"))
    );
    for other in ["", "/", "web", "system.slice:cri:web", "/kubepods/../web"] {
        assert_eq!(below_the_root(other), None, "{other}");
    }
}

/// The state directory of a container, with the fifo.
fn state(root: &Path, id: &str) -> PathBuf {
    let state = root.join(id);
    fs::create_dir(&state).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(state.join(START_FIFO))
            .status()
            .unwrap()
            .success()
    );
    state
}

/// A process that has the fifo of this state open and waits.
fn waiting_for(state: &Path) -> Child {
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 3<>\"$1\"; echo there; read forever; :", "crun"])
        .arg(state.join(START_FIFO));
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut there = [0; 6];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut there)
        .unwrap();
    child
}

fn cgroup_of(pids: &[u32]) -> tempfile::TempDir {
    let cgroup = tempfile::tempdir().unwrap();
    let below = cgroup.path().join("container");
    fs::create_dir(&below).unwrap();
    fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
    fs::write(
        below.join("cgroup.procs"),
        pids.iter()
            .map(|pid| format!("{pid}\n"))
            .collect::<String>(),
    )
    .unwrap();
    cgroup
}

#[test]
fn of_the_processes_below_a_cgroup_only_the_waiting_init_is_ended() {
    let root = tempfile::tempdir().unwrap();
    let [web, longer, other] = ["web", "web2", "other"].map(|id| state(root.path(), id));
    let mut init = waiting_for(&web);
    let mut others = [waiting_for(&longer), waiting_for(&other)];
    let cgroup = cgroup_of(&[others[0].id(), others[1].id(), init.id()]);
    assert_eq!(processes_within(cgroup.path()).len(), 3);

    // The runtime's root may be named through a link, as /var/run is.
    let link = root.path().join("link");
    std::os::unix::fs::symlink(root.path(), &link).unwrap();
    end_waiting_init(
        &[cgroup.path().to_owned(), cgroup.path().to_owned()],
        &link.join("web"),
    );
    assert_eq!(init.wait().unwrap().signal(), Some(9));
    for other in &mut others {
        assert_eq!(
            other.try_wait().unwrap(),
            None,
            "a process of another create was ended"
        );
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

/// `delete --force` may have removed the runtime's state.
#[test]
fn the_init_of_a_removed_state_is_ended() {
    let root = tempfile::tempdir().unwrap();
    let web = state(root.path(), "web");
    let mut init = waiting_for(&web);
    fs::remove_dir_all(&web).unwrap();
    end_waiting_init(&[cgroup_of(&[init.id()]).path().to_owned()], &web);
    assert_eq!(init.wait().unwrap().signal(), Some(9));
}

/// The process of a second container in the cgroup: a read of the command line would hang the
/// shim.
#[test]
fn a_process_that_holds_its_memory_does_not_delay_the_clean_up() {
    let root = tempfile::tempdir().unwrap();
    let web = state(root.path(), "web");
    let Some(holder) = Holder::start(c"crun", || {}) else {
        return;
    };
    assert!(
        blocks_readers(holder.pid()),
        "the process does not hold its memory"
    );
    let mut init = waiting_for(&web);
    end_waiting_init(
        &[cgroup_of(&[holder.pid(), init.id()]).path().to_owned()],
        &web,
    );
    assert_eq!(init.wait().unwrap().signal(), Some(9));
}

/// A process of a second container in the cgroup, whose links cannot be read.
#[test]
fn a_process_that_hangs_in_execve_does_not_delay_the_clean_up() {
    let root = tempfile::tempdir().unwrap();
    let web = state(root.path(), "web");
    let Some(executing) = Executing::start() else {
        return;
    };
    let mut init = waiting_for(&web);
    let cgroup = cgroup_of(&[executing.pid(), init.id()]);
    let path = cgroup.path().to_owned();
    let ended = unless_it_hangs(move || end_waiting_init(&[path], &web));
    if ended.is_none() {
        init.kill().unwrap();
    }
    assert_eq!(ended, Some(()), "the clean-up hangs");
    assert_eq!(init.wait().unwrap().signal(), Some(9));
}

#[test]
fn a_cgroup_that_is_gone_has_no_processes() {
    assert!(processes_within(Path::new("/no/such/cgroup")).is_empty());
}

#[test]
fn a_process_in_a_cgroup_or_below_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("app");
    fs::create_dir(&below).unwrap();
    fs::write(dir.path().join("cgroup.procs"), "").unwrap();
    fs::write(below.join("cgroup.procs"), "").unwrap();
    let is_empty = |cgroup: &Path| processes_within(cgroup).is_empty();
    assert!(is_empty(dir.path()) && is_empty(Path::new("/no/such/cgroup")));
    fs::write(below.join("cgroup.procs"), "0\n").unwrap();
    assert!(!is_empty(dir.path()));
}

/// EOPNOTSUPP of a threaded cgroup, EIO of a failing read: the file is there, and its content
/// is not known.
#[test]
fn an_unreadable_cgroup_is_not_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
    assert!(processes_within(dir.path())[0].is_err());
}

fn scope(unit: &str, path: &str) -> Option<(String, PathBuf)> {
    Some((unit.to_owned(), path.into()))
}

#[test]
fn a_path_in_systemds_form_names_a_scope_in_its_slices() {
    assert_eq!(
        systemd_scope(":cri:web"),
        scope("cri-web.scope", "system.slice/cri-web.scope")
    );
    assert_eq!(
        systemd_scope("kubepods-burstable-pod1_2.slice:cri-containerd:7"),
        scope(
            "cri-containerd-7.scope",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-7.scope"
        )
    );
    assert_eq!(
        systemd_scope("-.slice:cri:web"),
        scope("cri-web.scope", "cri-web.scope")
    );
    for other in [
        "",
        "/kubepods/web",
        "a.slice:cri",
        "a.slice::web",
        "a.slice:cri:b.slice",
        "a/b.slice:c:d",
        "a:b:c",
    ] {
        assert_eq!(systemd_scope(other), None, "{other}");
    }
    for slice in [
        "a--b.slice:cri:web",
        "-a.slice:cri:web",
        "a.slice:../cri:web",
    ] {
        assert_eq!(systemd_scope(slice), None, "{slice}");
    }
}
