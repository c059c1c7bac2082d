//! `denied_once SYSCALL ERRNO NUMBER PROGRAM ARGUMENTS...`: runs a program on a kernel that denies
//! it a syscall one time.
//!
//! strace(1) can inject errors, but not into syscalls newer than strace. seccomp(2) stops the
//! program at each call of SYSCALL. ptrace(2) fails call NUMBER, or no call if NUMBER is 0, and
//! continues the rest. The number of calls is printed on stderr: `denied_once: 12 calls`. Only
//! calls of the program's first thread are counted.

use std::convert::Infallible;
use std::env;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::process::{ExitCode, exit};

use anyhow::{Context, Result, bail};
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, execv, fork};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

const USAGE: &str = "usage: denied_once SYSCALL ERRNO NUMBER PROGRAM ...";

fn main() -> Result<ExitCode> {
    let mut words = env::args_os().skip(1);
    let mut number = || words.next()?.to_str()?.parse::<i64>().ok();
    let (syscall, errno, which) = (
        number().context(USAGE)?,
        number().context(USAGE)?,
        number().context(USAGE)?,
    );
    let filter = stop_at(syscall)?;
    let words = words
        .map(|word: OsString| CString::new(word.into_vec()))
        .collect::<Result<Vec<_>, _>>()?;
    // SAFETY: the process has a single thread; the child may call any function, and ends or
    // executes a program.
    match unsafe { fork() }.context("fork")? {
        ForkResult::Child => {
            let Err(error) = become_program(&filter, &words);
            eprintln!("denied_once: {error:#}");
            exit(127)
        }
        ForkResult::Parent { child } => supervise(child, errno, which),
    }
}

fn stop_at(syscall: i64) -> Result<BpfProgram> {
    let rules = [(syscall, Vec::new())].into_iter().collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Trace(0),
        env::consts::ARCH.try_into()?,
    )?;
    Ok(filter.try_into()?)
}

fn become_program(filter: &BpfProgram, words: &[CString]) -> Result<Infallible> {
    ptrace::traceme().context("be traced")?;
    // Here the supervisor names the calls that it wants to receive.
    raise(Signal::SIGSTOP).context("wait for the supervisor")?;
    apply_filter(filter).context("apply the filter")?;
    execv(words.first().context(USAGE)?, words).context("run the program")
}

fn supervise(child: Pid, errno: i64, which: i64) -> Result<ExitCode> {
    let mut calls = 0;
    waitpid(child, None).context("wait for the child")?;
    ptrace::setoptions(
        child,
        Options::PTRACE_O_TRACESECCOMP | Options::PTRACE_O_EXITKILL,
    )?;
    ptrace::cont(child, None)?;
    loop {
        match waitpid(child, None).context("wait for the program")? {
            WaitStatus::PtraceEvent(_, _, libc::PTRACE_EVENT_SECCOMP) => {
                calls += 1;
                if calls == which {
                    deny(child, errno)?;
                }
                ptrace::cont(child, None)?;
            }
            // That of an execve(2).
            WaitStatus::Stopped(_, Signal::SIGTRAP) => ptrace::cont(child, None)?,
            WaitStatus::Stopped(_, signal) => ptrace::cont(child, signal)?,
            WaitStatus::Exited(_, code) => {
                eprintln!("denied_once: {calls} calls");
                return Ok(ExitCode::from(u8::try_from(code)?));
            }
            WaitStatus::Signaled(_, signal, _) => bail!("the program was ended by {signal}"),
            _ => ptrace::cont(child, None)?,
        }
    }
}

/// The call is skipped, and this is its answer. seccomp(2), `SECCOMP_RET_TRACE`
#[cfg(target_arch = "x86_64")]
fn deny(child: Pid, errno: i64) -> Result<()> {
    let mut registers = ptrace::getregs(child).context("read the registers")?;
    registers.orig_rax = u64::MAX;
    registers.rax = (-errno).cast_unsigned();
    ptrace::setregs(child, registers).context("write the registers")
}

#[cfg(not(target_arch = "x86_64"))]
fn deny(_: Pid, _: i64) -> Result<()> {
    bail!("the registers of this machine are not known here")
}
