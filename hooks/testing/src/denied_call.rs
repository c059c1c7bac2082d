//! A syscall that fails for one thread.

use nix::errno::Errno;
use nix::libc::c_long;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// Makes a syscall fail in the calling thread, and in the processes that the thread starts. Nothing
/// allows the call again: use a thread of the test's own.
pub fn deny_call(call: c_long, errno: Errno) {
    let rules = [(call, Vec::new())].into_iter().collect();
    let (allow, deny) = (SeccompAction::Allow, SeccompAction::Errno(errno as u32));
    let machine = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, allow, deny, machine).unwrap();
    apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}
