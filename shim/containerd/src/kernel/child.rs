//! Settings that a child makes itself, between fork(2) and execve(2): [`Command`] has none of them.
//!
//! Only functions that signal-safety(7) allows may run there: any thread of the parent may hold the
//! allocator's lock.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::getpid;

use super::signals::{LIBC_SIGNALS, set_disposition};

/// The kernel kills the child when the parent thread ends, see prctl(2). So the event loop's thread
/// must start the child.
pub(crate) fn die_with_this_thread(command: &mut Command) {
    let parent = getpid().as_raw_pid();
    // SAFETY: the closure makes two system calls that take numbers, and owns a number.
    unsafe {
        command.pre_exec(move || {
            done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The parent may have died before the call.
            if libc::getppid() == parent {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        });
    }
}

/// The child begins without the ignored signals of the server. execve(2) resets handlers, and
/// `Command` SIGPIPE and the mask.
pub(crate) fn with_default_signals(command: &mut Command) {
    // SAFETY: the closure makes system calls that take numbers and a struct on its own stack.
    unsafe {
        command.pre_exec(|| {
            LIBC_SIGNALS
                .iter()
                .for_each(|signal| set_disposition(*signal, libc::SIG_DFL));
            Ok(())
        });
    }
}

/// The child inherits this descriptor under the same number.
pub(crate) fn inherit(command: &mut Command, fd: OwnedFd) {
    // SAFETY: the closure makes one system call, and owns the descriptor.
    unsafe {
        command.pre_exec(move || done(libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0)));
    }
}

/// The child inherits these descriptors as 3, 4, 5 and so on, and no descriptors above.
pub(crate) fn inherit_from_three(command: &mut Command, fds: Vec<OwnedFd>) -> io::Result<()> {
    const FIRST: RawFd = 3;
    let Some(one) = fds.first() else {
        return Ok(());
    };
    let end = FIRST + RawFd::try_from(fds.len()).map_err(io::Error::other)?;
    // Numbers above the targets, so that no source is overwritten before its turn.
    let sources: Vec<OwnedFd> = fds
        .iter()
        .map(|fd| fcntl_dupfd_cloexec(fd, end))
        .collect::<Result<_, _>>()?;
    // Between fork and exec `Command` has its own pipe, which reports a failed exec. While these
    // numbers are in use the pipe gets a higher number and is not overwritten.
    let mut taken = Vec::new();
    loop {
        let duplicate = fcntl_dupfd_cloexec(one, FIRST)?;
        if duplicate.as_raw_fd() >= end {
            break;
        }
        taken.push(duplicate);
    }
    // SAFETY: the closure only calls dup2(2), on descriptors that it owns. dup2 replaces only
    // copies of `taken` in the child, or descriptors that exec closes.
    unsafe {
        command.pre_exec(move || {
            let _numbers_stay_taken = &taken;
            (FIRST..end)
                .zip(&sources)
                .try_for_each(|(target, source)| done(libc::dup2(source.as_raw_fd(), target)))
        });
    }
    Ok(())
}

fn done(result: libc::c_int) -> io::Result<()> {
    Ok(Errno::result(result).map(drop)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Stdio;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn a_child_has_the_default_signals_and_dies_with_its_parent() {
        LIBC_SIGNALS
            .iter()
            .for_each(|signal| set_disposition(*signal, libc::SIG_IGN));
        let mut status = Command::new("cat");
        status.arg("/proc/self/status");
        let ignored = |command: &mut Command| {
            let output = command.output().unwrap().stdout;
            let status = String::from_utf8(output).unwrap();
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigIgn:\t"))
                .unwrap();
            u64::from_str_radix(mask, 16).unwrap()
        };
        let of_the_library = LIBC_SIGNALS
            .iter()
            .map(|signal| 1 << (signal - 1))
            .sum::<u64>();
        assert_eq!(ignored(&mut status) & of_the_library, of_the_library);
        with_default_signals(&mut status);
        assert_eq!(
            ignored(&mut status) & (of_the_library | 1 << (libc::SIGPIPE - 1)),
            0
        );

        let starter = std::thread::spawn(|| {
            let mut child = Command::new("sleep");
            die_with_this_thread(child.arg("60"));
            child.spawn().unwrap()
        });
        let mut child = starter.join().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()),
            Some(libc::SIGKILL)
        );
    }

    #[test]
    fn an_inherited_descriptor_keeps_its_number_and_others_are_closed() {
        let (kept, _other) = (
            File::open("/dev/null").unwrap(),
            File::open("/dev/zero").unwrap(),
        );
        let script = "ls -l /proc/self/fd | grep -c -e /dev/zero; readlink /proc/self/fd/$KEPT";
        let mut command = shell(script);
        command
            .env("KEPT", kept.as_raw_fd().to_string())
            .stdin(Stdio::null());
        inherit(&mut command, kept.into());
        assert_eq!(
            String::from_utf8(command.output().unwrap().stdout).unwrap(),
            "0\n/dev/null\n"
        );
    }
}
