//! Two `start`s at once, a dead server, and names that an older shim left.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn claimed(link: &Path) -> Claim {
    claim(link, |_| Ok(true)).unwrap()
}

fn new(link: &Path) -> OwnSocket {
    let Claim::New(own) = claimed(link) else {
        panic!("another server listens")
    };
    own
}

fn names(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

/// Between fork and exec, a child of a parallel test has this test's sockets open.
fn until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Closes the socket and leaves its name and the link, like a server that was killed.
fn killed(own: OwnSocket) -> PathBuf {
    let path = own.hand_over();
    until(|| connect_to(&path).is_err());
    path
}

fn gos_killed(link: &Path) {
    drop(UnixListener::bind(link).unwrap());
    until(|| connect_to(link).is_err());
}

fn is_gone(socket: &Path) -> bool {
    matches!(remove_stale(socket), SocketState::Gone)
}

#[test]
fn a_living_server_is_found_and_a_dead_one_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, link) = (dir.path().join("s"), dir.path().join("s/group"));
    let own = new(&link);
    assert_eq!(
        fs::metadata(&link).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert_eq!(
        fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
        0o700
    );
    assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
    let dead = killed(own);
    let next = new(&link);
    assert!(!dead.try_exists().unwrap() && names(&folder) == 2);
    drop(next);
    assert_eq!(names(&folder), 0);
}

#[test]
fn a_server_that_ends_does_not_keep_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let ending = new(&link);
    let Claim::New(next) = claim(&link, |_| Ok(false)).unwrap() else {
        panic!("it ends")
    };
    // The older server removes only its own socket.
    drop(ending);
    assert!(matches!(claimed(&link), Claim::Serving(path) if path == next.path));
}

#[test]
fn one_living_process_has_the_right_to_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, link) = (dir.path().join("socket"), dir.path().join("group"));
    let [own, other] = [&link; 2].map(|link| OwnSocket::bind(link).unwrap());
    let take = |owner: &OwnSocket| LinkRight::take(&socket, &owner.path).unwrap();
    let right = take(&own).unwrap();
    assert!(take(&other).is_none());
    drop(right);
    let right = take(&other).unwrap();
    std::mem::forget(right);
    killed(other);
    drop(take(&own).unwrap());
    drop(own);
    assert_eq!(names(dir.path()), 1, "only the killed owner's socket");
}

/// A slow `start` does not change a link that a faster `start` has changed meanwhile.
#[test]
fn a_link_to_another_server_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let own = new(&link);
    let slow = OwnSocket::bind(&link).unwrap();
    let before = dir.path().join("the-one-before");
    assert!(!replace(&link, &before, &slow.path).unwrap());
    assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
}

/// Two starts at once, beside no server, a dead server, and a dead server of Go's shim at the
/// link's path: one start makes the link, the second start finds the link.
#[test]
fn of_two_starts_one_makes_the_server() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..200 {
        let link = dir.path().join(format!("group{round}"));
        match round % 3 {
            0 => {}
            1 => drop(killed(new(&link))),
            _ => gos_killed(&link),
        }
        let together = Barrier::new(2);
        let start = || {
            together.wait();
            claimed(&link)
        };
        let claims = thread::scope(|scope| {
            let other = scope.spawn(start);
            [start(), other.join().unwrap()]
        });
        match claims {
            [Claim::New(own), Claim::Serving(found)] | [Claim::Serving(found), Claim::New(own)] => {
                assert_eq!(own.path, found);
            }
            [Claim::New(_), Claim::New(_)] => panic!("two servers in round {round}"),
            [Claim::Serving(_), Claim::Serving(_)] => panic!("no server in round {round}"),
        }
    }
}

/// Many starts at once, beside the server of the last round: all starts get the same new server.
/// The old server is dead, or dead while `delete` removes the link, or removes the link at its end.
#[test]
fn of_many_starts_one_makes_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let mut last = new(&link);
    for round in 0..600 {
        let (path, together) = (last.path.clone(), Barrier::new(9));
        let ending = match round % 3 {
            2 => Some(last),
            _ => {
                killed(last);
                None
            }
        };
        let start = || {
            together.wait();
            let is_old =
                |server: &UnixStream| server.peer_addr().unwrap().as_pathname() == Some(&path);
            claim(&link, |server| Ok(!is_old(&server))).unwrap()
        };
        let (new, found): (Vec<_>, Vec<_>) = thread::scope(|scope| {
            let starts: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
            together.wait();
            match ending {
                Some(own) => drop(own),
                None if round % 3 == 1 => drop(remove_stale(&path)),
                None => {}
            }
            starts
                .into_iter()
                .map(|start| start.join().unwrap())
                .partition(|claim| matches!(claim, Claim::New(_)))
        });
        let [Claim::New(own)] = <[Claim; 1]>::try_from(new)
            .unwrap_or_else(|new| panic!("{} in round {round}", new.len()))
        else {
            panic!("no server in round {round}")
        };
        assert!(
            found
                .iter()
                .all(|claim| matches!(claim, Claim::Serving(path) if *path == own.path)),
            "round {round}"
        );
        assert_eq!(names(dir.path()), 2, "round {round}");
        last = own;
    }
}

/// Every process that can read the folder can hold flock(2) on it.
#[test]
fn a_lock_on_the_folder_delays_no_start() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let reader = fs::File::open(dir.path()).unwrap();
    flock(&reader, FlockOperation::LockExclusive).unwrap();
    let (done, both) = mpsc::channel();
    thread::spawn(move || {
        let socket = killed(new(&link));
        done.send(is_gone(&socket) && !socket.try_exists().unwrap())
    });
    assert_eq!(both.recv_timeout(LIMIT), Ok(true));
}

#[test]
fn only_a_stale_socket_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let own = new(&link);
    assert!(matches!(remove_stale(&own.path), SocketState::Accepts(_)));
    assert_eq!(names(dir.path()), 2);
    let socket = killed(own);
    assert!(is_gone(&socket));
    assert_eq!(names(dir.path()), 0);
    assert!(is_gone(&socket));
}

/// `delete` removes the containers of a server that is gone.
#[test]
fn a_server_that_does_not_accept_is_not_gone() {
    let dir = tempfile::tempdir().unwrap();
    let own = new(&dir.path().join("group"));
    let mut waiting = Vec::new();
    while let Some(connection) = connect_to(&own.path).unwrap() {
        waiting.push(connection);
    }
    assert!(matches!(remove_stale(&own.path), SocketState::Silent));
}

/// The bundle of an older shim, or Go's, names the group itself.
#[test]
fn a_link_at_the_place_of_an_older_socket_is_kept_for_its_living_server() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let own = new(&link);
    remove(&link, &link);
    assert!(matches!(claimed(&link), Claim::Serving(path) if path == own.path));
    assert!(matches!(remove_stale(&link), SocketState::Accepts(_)));
    killed(own);
    assert!(is_gone(&link));
    assert_eq!(names(dir.path()), 0);
}

#[test]
fn the_socket_of_gos_shim_is_found_and_replaced_when_it_is_dead() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("group");
    let gos = UnixListener::bind(&link).unwrap();
    assert!(matches!(claimed(&link), Claim::Serving(path) if path == link));
    drop(gos);
    until(|| connect_to(&link).is_err());
    drop(new(&link));
    assert_eq!(names(dir.path()), 0);
}
