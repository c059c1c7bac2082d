//! Starts a program as posix_spawn(3) does: until it has become the program, the child runs in this process's memory.
//!
//! fork(2) copies the page tables, and afterwards both processes fault in again each page that they touch. `std` also avoids
//! this, but not for a child that dies with its parent, which only the child itself can request. The C library reads and sets
//! the handler of each of 64 signals.

mod child;

use std::{
    ffi::{CString, OsStr, OsString, c_char},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::Path,
    ptr::null,
};

use rustix::{
    io::fcntl_dupfd_cloexec,
    process::{WaitId, WaitIdOptions, getpid, waitid},
};

use child::{Orders, clone, without_signals};

/// A program to be run.
pub(crate) struct Launch<'a> {
    /// The executable.
    pub(crate) program: &'a Path,
    /// The arguments after its name.
    pub(crate) arguments: &'a [OsString],
    /// Added to this process's environment.
    pub(crate) environment: &'a [(&'static str, OsString)],
    /// The working directory.
    pub(crate) directory: &'a Path,
    /// Its stdin, stdout and stderr.
    pub(crate) streams: [BorrowedFd<'a>; 3],
    /// Stays open in the program, under the number it has here.
    pub(crate) kept: Option<BorrowedFd<'a>>,
    /// True if it gets its own process group.
    pub(crate) leads_group: bool,
    /// True if the kernel kills it when the thread that started it ends: then only the event loop's thread may start it.
    pub(crate) dies_with_parent: bool,
}

/// A running child.
#[derive(Debug)]
pub(crate) struct Launched {
    /// Its pid.
    pub(crate) pid: u32,
    /// Its pidfd.
    pub(crate) pidfd: OwnedFd,
}

impl Launch<'_> {
    /// Starts it. A program that cannot be executed is an error of this call.
    pub(crate) fn launch(&self) -> io::Result<Launched> {
        let program = c_string(self.program.as_os_str())?;
        let directory = c_string(self.directory.as_os_str())?;
        let arguments = self.arguments.iter().map(|word| c_string(word));
        let arguments = [Ok(program.clone())].into_iter().chain(arguments).collect::<io::Result<Vec<_>>>()?;
        let environment = self.whole_environment()?;
        let (arguments, environment) = (pointers(&arguments), pointers(&environment));
        // Numbers above the targets, so that none is overwritten before its turn.
        let [stdin, stdout, stderr] = self.streams.map(|fd| fcntl_dupfd_cloexec(fd, 3));
        let streams = [stdin?, stdout?, stderr?];
        let mut errno = 0;
        let launched = without_signals(|mask| {
            clone(&mut Orders {
                program: program.as_ptr(),
                arguments: arguments.as_ptr(),
                environment: environment.as_ptr(),
                directory: directory.as_ptr(),
                streams: streams.each_ref().map(AsRawFd::as_raw_fd),
                kept: self.kept.map(|fd| fd.as_raw_fd()),
                leads_group: self.leads_group,
                parent: self.dies_with_parent.then(|| getpid().as_raw_pid()),
                mask,
                errno: &mut errno,
            })
        })?;
        if errno == 0 {
            return Ok(launched);
        }
        let _ = waitid(WaitId::PidFd(launched.pidfd.as_fd()), WaitIdOptions::EXITED);
        Err(io::Error::from_raw_os_error(errno))
    }

    fn whole_environment(&self) -> io::Result<Vec<CString>> {
        let is_added = |name: &OsStr| self.environment.iter().any(|(added, _)| name == *added);
        let own = std::env::vars_os().filter(|(name, _)| !is_added(name));
        let added = self.environment.iter().map(|(name, value)| (OsString::from(name), value.clone()));
        let line = |(mut line, value): (OsString, OsString)| {
            line.push("=");
            line.push(value);
            Ok(CString::new(line.into_vec())?)
        };
        own.chain(added).map(line).collect()
    }
}

fn c_string(word: &OsStr) -> io::Result<CString> {
    Ok(CString::new(word.as_bytes())?)
}

/// In the form of execve(2). They point into the argument.
fn pointers(words: &[CString]) -> Vec<*const c_char> {
    words.iter().map(|word| word.as_ptr()).chain([null()]).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Seek},
        os::fd::AsFd,
    };

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn said(script: &str, environment: &[(&'static str, OsString)], leads_group: bool) -> String {
        let mut out = File::from(memfd_create("out", MemfdFlags::CLOEXEC).unwrap());
        let nowhere = File::open("/dev/null").unwrap();
        let launch = Launch {
            program: Path::new("/bin/sh"),
            arguments: &["-c".into(), script.into()],
            environment,
            directory: Path::new("/tmp"),
            streams: [nowhere.as_fd(), out.as_fd(), out.as_fd()],
            kept: None,
            leads_group,
            dies_with_parent: true,
        };
        let launched = launch.launch().unwrap();
        waitid(WaitId::PidFd(launched.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        let mut text = String::new();
        out.rewind().unwrap();
        out.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn directory_environment_streams_and_group_are_as_asked() {
        let added = [("BINDGUARD_TEST", OsString::from("a=b"))];
        assert_eq!(said("pwd; echo $BINDGUARD_TEST; echo $PATH >&2", &added, false), {
            let path = std::env::var("PATH").unwrap();
            format!("/tmp\na=b\n{path}\n")
        });
        assert_eq!(said("[ $(cut -d' ' -f5 /proc/$$/stat) = $$ ] && echo leads", &[], true), "leads\n");
    }

    #[test]
    fn signals_are_as_they_are_for_any_program() {
        let masks = said("exec cat /proc/self/status", &[], false);
        let of_word = |name: &str| {
            let line = masks.lines().find(|line| line.starts_with(name)).unwrap();
            u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap()
        };
        assert_eq!((of_word("SigBlk"), of_word("SigCgt")), (0, 0));
        assert_eq!(of_word("SigIgn") & (1 << 12), 0, "SIGPIPE, which Rust ignores");
    }

    #[test]
    fn a_program_that_cannot_be_run_is_an_error_and_no_child() {
        let nowhere = File::open("/dev/null").unwrap();
        let launch = Launch {
            program: Path::new("/proc/self/nonexistent"),
            arguments: &[],
            environment: &[],
            directory: Path::new("/"),
            streams: [nowhere.as_fd(); 3],
            kept: None,
            leads_group: false,
            dies_with_parent: false,
        };
        assert_eq!(launch.launch().unwrap_err().kind(), io::ErrorKind::NotFound);
        let elsewhere =
            Launch { directory: Path::new("/proc/self/nonexistent"), program: Path::new("/bin/sh"), ..launch };
        assert_eq!(elsewhere.launch().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_is_kept_is_open_to_the_program_and_what_is_not_is_closed() {
        let (kept, other) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        let script =
            "ls -l /proc/self/fd | sed 's/.*-> //' | grep -c -e /dev/zero; [ -e /proc/self/fd/$KEPT ] && echo kept";
        let out = File::from(memfd_create("out", MemfdFlags::CLOEXEC).unwrap());
        let launch = Launch {
            program: Path::new("/bin/sh"),
            arguments: &["-c".into(), script.into()],
            environment: &[("KEPT", kept.as_raw_fd().to_string().into())],
            directory: Path::new("/"),
            streams: [kept.as_fd(), out.as_fd(), out.as_fd()],
            kept: Some(kept.as_fd()),
            leads_group: false,
            dies_with_parent: false,
        };
        let launched = launch.launch().unwrap();
        waitid(WaitId::PidFd(launched.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        drop(other);
        let mut out = out;
        let mut text = String::new();
        out.rewind().unwrap();
        out.read_to_string(&mut text).unwrap();
        assert_eq!(text, "0\nkept\n");
    }
}
