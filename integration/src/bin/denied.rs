//! `denied RULE[,RULE...] PROGRAM ARGUMENTS...`: runs a program on a kernel that denies it a
//! syscall.
//!
//! A rule is `SYSCALL=ERRNO`, two numbers, or `no-beneath`: move_mount(2) then knows no
//! `MOVE_MOUNT_BENEATH`, as before Linux 6.5. seccomp(2) answers in the kernel's stead; what the
//! program starts is under the same rules.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};

/// `<linux/mount.h>`
const MOVE_MOUNT_BENEATH: u64 = 0x200;

fn main() -> Result<()> {
    let mut words = env::args_os().skip(1);
    let rules = words
        .next()
        .and_then(|rules| rules.into_string().ok())
        .context("usage: denied RULES PROGRAM ...")?;
    let program = words.next().context("usage: denied RULES PROGRAM ...")?;
    let words: Vec<OsString> = words.collect();
    for filter in rules.split(',').map(filter).collect::<Result<Vec<_>>>()? {
        apply_filter(&filter).context("apply the rule")?;
    }
    let error = Command::new(&program).args(words).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}

fn filter(rule: &str) -> Result<BpfProgram> {
    let (syscall, errno, arguments) = match rule.split_once('=') {
        Some((syscall, errno)) => (
            syscall.parse().context("a syscall's number")?,
            errno.parse()?,
            Vec::new(),
        ),
        None => (libc::SYS_move_mount, libc::EINVAL as u32, vec![beneath()?]),
    };
    let denied = SeccompAction::Errno(errno);
    let rules = [(syscall, arguments)].into_iter().collect();
    Ok(SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        denied,
        env::consts::ARCH.try_into()?,
    )?
    .try_into()?)
}

fn beneath() -> Result<SeccompRule> {
    let flag = SeccompCmpOp::MaskedEq(MOVE_MOUNT_BENEATH);
    let condition = SeccompCondition::new(4, SeccompCmpArgLen::Dword, flag, MOVE_MOUNT_BENEATH)?;
    Ok(SeccompRule::new(vec![condition])?)
}
