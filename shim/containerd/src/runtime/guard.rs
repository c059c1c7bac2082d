//! Runs `create` and `restore`, which make a container, through the guard.
//!
//! `bindguard-runtime` is called with the runtime's own arguments. The guard checks the bundle's
//! mounts, repairs stale mounts and then *becomes* the runtime by exec. Right before the exec, the
//! guard writes a line to a pipe, whose write end closes when the guard becomes the runtime:
//!
//! ```text
//!   handover          the runtime runs now; its result is the call's
//!   handover prove    likewise, and the mounts of the new container must be compared with the record in the bundle
//!   refused REASON    policy; the call fails with the reason
//!   unchanged         (only in a retry after a failure) nothing was stale: the failure is final
//!   unrepaired REASON (a second line) a bind that the guard left as it was: added to the runtime's error if it fails
//!   end of file       the guard died
//!   nothing in time   the guard hangs, perhaps on a dead mount: it is killed and not waited for
//! ```
//! In the last two cases, and if no guard is installed, the runtime runs without a guard: a guard
//! that breaks creates is worse than a stale bind. But if the policy refuses any verdict, the shim
//! refuses the container, because an unchecked bind may have this verdict. After a failure of the
//! runtime the guard runs again, up to three times: a volume may have been updated between its
//! check and the runtime's mount (kubernetes#127602). The runtime's text is not parsed. The output
//! of a failed try does not appear in the container's output after the next try.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::handover::{self, GuardAnswer, MAX_ANSWER, unrepaired_in};
use bindguard_core::plan::refusal_of_unseen;
use bindguard_core::policy::Policy;
use bindguard_core::program_names::WRAPPER;
use bindguard_core::report::Unchecked;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::timeout;

use super::invoke::{RunStreams, Running, RuntimeCall, RuntimeError};
use super::{Runtime, is_program, look_up};
use crate::blocking::run_blocking;
use crate::io::PreparedIo;

const RETRIES: u32 = 3;
/// The time limit for the end of a killed guard, which may have become the runtime.
const KILL_GRACE: Duration = Duration::from_millis(500);
/// For the second line, which is written together with the first: the pipe closes when the runtime
/// begins.
const REST_LIMIT: Duration = Duration::from_millis(500);

/// The container that `create` or `restore` makes.
pub struct NewContainer<'a> {
    pub id: &'a str,
    pub prepared_io: &'a PreparedIo,
    /// chroot instead of pivot_root.
    pub no_pivot_root: bool,
    pub settings: &'a GuardSettings,
}

/// A call of the runtime that makes a container.
struct GuardedCall<'a> {
    verb: &'static str,
    args: Vec<OsString>,
    container: &'a NewContainer<'a>,
}

/// The settings of the guard, and the policy for a container that it could not check.
#[derive(Debug)]
pub struct GuardSettings {
    pub deadline: Duration,
    /// Decides whether an unchecked container is refused.
    pub policy: Policy,
    /// For a create without a guard; a guard writes its own line.
    pub journal: Option<PathBuf>,
}

/// The result of a run of the guard.
enum GuardResult {
    Created {
        is_provable: bool,
    },
    RuntimeFailed(RuntimeError),
    Refused(String),
    /// The reason for the bind that the guard left as it was.
    Unchanged(Option<String>),
    /// No runtime ran, for this reason.
    NoGuard(String),
}

impl Runtime {
    /// Makes the container, admitted by the guard if there is one. `args` are the verb's own.
    /// Returns true if the bundle has a record of the container's mounts.
    pub(super) async fn create_or_restore(
        &self,
        verb: &'static str,
        mut args: Vec<OsString>,
        container: &NewContainer<'_>,
    ) -> Result<bool, RuntimeError> {
        args.extend(["--bundle".into(), (&self.bundle.path).into()]);
        args.extend(["--pid-file".into(), self.bundle.init_pid_file().into()]);
        if let Some(socket) = container.prepared_io.console_socket() {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        if container.no_pivot_root {
            args.push("--no-pivot".into());
        }
        args.push(container.id.into());
        let call = GuardedCall {
            verb,
            args,
            container,
        };
        let made = self.run_through_guard(&call).await;
        made.map_err(|error| error.into_final(container.prepared_io))
    }

    async fn run_through_guard(&self, call: &GuardedCall<'_>) -> Result<bool, RuntimeError> {
        self.resolve_binary().await?;
        let Some(guard) = guard_program().await else {
            let why = format!("{WRAPPER} is not installed");
            self.record_missing_guard(call.container, &why);
            return self.run_unguarded(call, &why).await;
        };
        let id = call.container.id;
        let mut failure = match self.run_guard(&guard, call, 0).await {
            GuardResult::Created { is_provable } => return Ok(is_provable),
            GuardResult::Refused(reason) => return Err(RuntimeError::Refused { reason }),
            GuardResult::RuntimeFailed(failure) => failure,
            GuardResult::Unchanged(_) => {
                let why = "the guard answered as for a retry";
                return self.run_unguarded(call, why).await;
            }
            GuardResult::NoGuard(why) => {
                let why = format!("the guard did not hand over ({why})");
                return self.run_unguarded(call, &why).await;
            }
        };
        for attempt in 1..=RETRIES {
            self.remove_failed_create(id).await;
            call.container.prepared_io.withhold_output();
            match self.run_guard(&guard, call, attempt).await {
                GuardResult::Created { is_provable } => {
                    tracing::info!(
                        id,
                        attempt,
                        "created after a mount was repaired; before: {failure}"
                    );
                    return Ok(is_provable);
                }
                GuardResult::Refused(reason) => return Err(RuntimeError::Refused { reason }),
                GuardResult::RuntimeFailed(again) => failure = again,
                GuardResult::Unchanged(unrepaired) => {
                    return Err(failure.with_unrepaired(unrepaired));
                }
                GuardResult::NoGuard(why) => {
                    tracing::warn!(id, attempt, "no second check of the mounts: {why}");
                    return Err(failure);
                }
            }
        }
        Err(failure)
    }

    async fn run_unguarded(&self, call: &GuardedCall<'_>, why: &str) -> Result<bool, RuntimeError> {
        let container = call.container;
        if let Some(reason) = refusal_of_unseen(why, &container.settings.policy) {
            return Err(RuntimeError::Refused { reason });
        }
        tracing::warn!(
            id = container.id,
            "{why}: the container is created without a check of its mounts"
        );
        // A guard that broke, or was killed when it had become the runtime, may have written to the
        // container's stderr.
        if let Some(output) = container.prepared_io.last_output() {
            tracing::warn!(id = container.id, "the guard's last output: {output}");
        }
        let program = self.resolve_binary().await?;
        let plain = RuntimeCall::new(self, program, call.verb, call.args.clone());
        let streams = RunStreams::Process(container.prepared_io);
        plain.run(streams).await.map(|_| false)
    }

    async fn run_guard(&self, guard: &Path, call: &GuardedCall<'_>, attempt: u32) -> GuardResult {
        let container = call.container;
        let (running, mut answers) = match self.spawn_guard(guard, call, attempt) {
            Ok(spawned) => spawned,
            Err(error) => return GuardResult::NoGuard(error.to_string()),
        };
        let mut received = Vec::new();
        let deadline = container.settings.deadline;
        let (how, why) = if timeout(deadline, read_answer(&mut answers, &mut received))
            .await
            .is_ok()
        {
            let answer = parse_answer(&received);
            if let Some(GuardAnswer::Handover { prove }) = answer {
                return match running.finish().await {
                    Ok(_) => GuardResult::Created { is_provable: prove },
                    Err(error) => {
                        let unrepaired = read_unrepaired(&mut answers, &mut received).await;
                        GuardResult::RuntimeFailed(error.with_unrepaired(unrepaired))
                    }
                };
            }
            let _ = running.finish_within(KILL_GRACE).await;
            match answer {
                Some(GuardAnswer::Refused(reason)) => return GuardResult::Refused(reason),
                Some(GuardAnswer::Unchanged) => {
                    let unrepaired = read_unrepaired(&mut answers, &mut received).await;
                    return GuardResult::Unchanged(unrepaired);
                }
                _ => {}
            }
            let received = String::from_utf8_lossy(&received);
            let why = format!("unexpected answer {received:?}");
            (Unchecked::Died, why)
        } else {
            running.kill_group();
            let _ = running.finish_within(KILL_GRACE).await;
            let _ = answers.try_read_buf(&mut received);
            // At the very last moment the guard may have become the runtime: then the container that
            // it began must be removed before the runtime runs again.
            if matches!(parse_answer(&received), Some(GuardAnswer::Handover { .. }))
                || self.knows(container.id)
            {
                self.remove_failed_create(container.id).await;
            }
            (Unchecked::Late, format!("no answer within {deadline:?}"))
        };
        self.spawn_unchecked_record(guard, container, attempt, how, &why);
        GuardResult::NoGuard(why)
    }

    fn spawn_guard(
        &self,
        guard: &Path,
        call: &GuardedCall<'_>,
        attempt: u32,
    ) -> io::Result<(Running, pipe::Receiver)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let answers = pipe::Receiver::from_owned_fd(read)?;
        let mut request = RuntimeCall::new(self, guard.to_owned(), call.verb, call.args.clone());
        request.environment = vec![
            (handover::RUNTIME_VARIABLE, (&self.binary).into()),
            (
                handover::PIPE_VARIABLE,
                write.as_raw_fd().to_string().into(),
            ),
            (handover::ATTEMPT_VARIABLE, attempt.to_string().into()),
        ];
        // A probe that the guard forked holds the container's streams: it must be killed together
        // with a late guard.
        request.leads_group = true;
        request.inherited = Some(write);
        let running = request
            .spawn(RunStreams::Process(call.container.prepared_io))
            .map_err(io::Error::other)?;
        Ok((running, answers))
    }
}

/// The shim's own folder first: the two belong together, and PATH may have another version. Away
/// from the event loop: see [`Runtime::resolve_binary`].
pub async fn guard_program() -> Option<PathBuf> {
    let find = || {
        let shim = fs::read_link("/proc/self/exe").ok();
        let beside = shim.and_then(|shim| Some(shim.parent()?.join(WRAPPER)));
        beside
            .filter(|path| is_program(path))
            .or_else(|| look_up(WRAPPER))
    };
    run_blocking(find).await.ok().flatten()
}

/// Reads up to the end of the first line, or of the pipe.
async fn read_answer(answers: &mut pipe::Receiver, received: &mut Vec<u8>) {
    read_while(answers, received, |received| !received.contains(&b'\n')).await;
}

/// Reads the rest, and returns a reason for which the runtime can have failed.
async fn read_unrepaired(answers: &mut pipe::Receiver, received: &mut Vec<u8>) -> Option<String> {
    let _ = timeout(REST_LIMIT, read_while(answers, received, |_| true)).await;
    unrepaired_in(&String::from_utf8_lossy(received)).map(str::to_owned)
}

async fn read_while(
    answers: &mut pipe::Receiver,
    received: &mut Vec<u8>,
    wants_more: impl Fn(&[u8]) -> bool,
) {
    while received.len() < MAX_ANSWER && wants_more(received) {
        match answers.read_buf(received).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => return tracing::warn!(%error, "cannot read the guard's answer"),
        }
    }
}

/// The answer in the first line of the received bytes; `None` if there is none. Only the first word
/// is checked, so that a later guard may add more.
fn parse_answer(received: &[u8]) -> Option<GuardAnswer> {
    let line = received.split(|byte| *byte == b'\n').next()?;
    GuardAnswer::parse(&String::from_utf8_lossy(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_the_answer() {
        let refused = Some(GuardAnswer::Refused("/mnt is not mounted".into()));
        assert_eq!(parse_answer(b"refused /mnt is not mounted\nmore"), refused);
        assert_eq!(parse_answer(b"unchanged"), Some(GuardAnswer::Unchanged));
        assert_eq!(parse_answer(b""), None);
        assert_eq!(parse_answer(b"\nunchanged\n"), None);
    }

    #[tokio::test]
    async fn a_second_line_is_the_reason() {
        for (sent, reason) in [
            ("handover\n", None),
            (
                "handover prove\nunrepaired app.conf is gone\n",
                Some("app.conf is gone"),
            ),
            ("unchanged\nof a later guard\nunrepaired why\n", Some("why")),
            ("unrepaired is no first line\n", None),
        ] {
            let (read, write) = io::pipe().unwrap();
            let mut answers = pipe::Receiver::from_owned_fd(read.into()).unwrap();
            io::Write::write_all(&mut { write }, sent.as_bytes()).unwrap();
            let mut received = Vec::new();
            read_answer(&mut answers, &mut received).await;
            assert_eq!(
                read_unrepaired(&mut answers, &mut received)
                    .await
                    .as_deref(),
                reason,
                "{sent:?}"
            );
        }
    }
}
