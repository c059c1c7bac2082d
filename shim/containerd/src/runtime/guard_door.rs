//! What makes a container, `create` and `restore`, by way of the guard.
//!
//! `bindguard-runtime` is called with the runtime's own arguments. It looks at the bundle's mounts, mends what is stale and
//! then *becomes* the runtime by exec. Right before, it says so in one line on a pipe:
//!
//! ```text
//!   handover          the runtime runs now; its result is the call's
//!   handover verify   likewise, and once it made the container the guard wants to look at its mounts
//!   refused REASON    policy; the call fails with the reason
//!   unchanged         (only when asked again after a failure) nothing was stale: the failure stands
//!   unrepaired REASON (a second line) what the guard left as it was: said beside the runtime's error if it fails
//!   end of file       the guard died
//!   nothing in time   the guard hangs, on a dead mount perhaps: it is killed and not waited for
//! ```
//! In the last two cases, and where no guard is installed, the runtime is run without it: a guard that breaks creates is worse
//! than the fault it guards against. Where policy refuses anything the container is refused: what it refuses may be there.
//! After a failure of the runtime the guard is asked again, up to three times: a volume may have been updated between its look
//! and the runtime's mount (kubernetes#127602). What the runtime says is not looked at; what a failed try wrote to the
//! container's stderr is not in the output of a container that the next try makes.

use std::{
    ffi::OsString,
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::Duration,
};

use bindguard_core::{plan::refusal_of_unseen, policy::Policy};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;

use super::{
    Runtime,
    handover::{Word, hear, hear_reason, word},
    invoke::{Call, Ends, Running, RuntimeError},
    is_program, look_up,
};
use crate::io::Wiring;

const GUARD: &str = "bindguard-runtime";
const RETRIES: u32 = 3;
/// How long a killed guard, that may have become the runtime, is given to be gone.
const KILL_GRACE: Duration = Duration::from_millis(500);

/// A call of the runtime that makes a container.
pub(super) struct Making<'a> {
    /// `create` or `restore`.
    pub(super) verb: &'static str,
    /// What follows the verb.
    pub(super) args: Vec<OsString>,
    /// The container.
    pub(super) id: &'a str,
    /// Its streams.
    pub(super) wiring: &'a Wiring,
    /// The guard's.
    pub(super) terms: &'a GuardTerms,
}

/// What is asked of the guard, and what becomes of a container that it did not come to look at.
#[derive(Debug)]
pub(crate) struct GuardTerms {
    /// How long it may take.
    pub(crate) deadline: Duration,
    /// What is refused.
    pub(crate) policy: Policy,
}

/// A container that was made.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Created {
    /// The guard wants to look at it: see [`Runtime::verify_apart`].
    pub(crate) is_worth_verifying: bool,
}

/// What came of one walk through the guard.
enum Passage {
    Created(Created),
    RuntimeFailed(RuntimeError),
    Refused(String),
    /// What the guard left as it was.
    Unchanged(Option<String>),
    /// No runtime ran; why.
    NoGuard(String),
}

impl Runtime {
    /// Makes the container, admitted by the guard where there is one.
    pub(super) async fn make(&self, call: &Making<'_>) -> Result<Created, RuntimeError> {
        self.make_by_guard(call).await.map_err(|error| error.for_good(call.wiring))
    }

    async fn make_by_guard(&self, call: &Making<'_>) -> Result<Created, RuntimeError> {
        self.resolve_binary()?;
        let Some(guard) = guard_program() else {
            return self.make_unguarded(call, &format!("{GUARD} is not installed")).await;
        };
        match self.pass(&guard, call, 0).await? {
            Passage::Created(created) => Ok(created),
            Passage::Refused(reason) => Err(RuntimeError::Refused { reason }),
            Passage::RuntimeFailed(failure) => self.make_again(&guard, call, failure).await,
            Passage::Unchanged(_) => self.make_unguarded(call, "the guard answered as if asked again").await,
            Passage::NoGuard(why) => self.make_unguarded(call, &format!("the guard did not hand over ({why})")).await,
        }
    }

    async fn make_again(&self, guard: &Path, call: &Making<'_>, first: RuntimeError) -> Result<Created, RuntimeError> {
        let mut failure = first;
        for attempt in 1..=RETRIES {
            self.clear_away(call.id).await;
            call.wiring.hold_back();
            match self.pass(guard, call, attempt).await? {
                Passage::Created(created) => {
                    tracing::info!(id = call.id, attempt, "created after a mount was mended; before: {failure}");
                    return Ok(created);
                }
                Passage::Refused(reason) => return Err(RuntimeError::Refused { reason }),
                Passage::RuntimeFailed(again) => failure = again,
                Passage::Unchanged(unrepaired) => return Err(failure.beside(unrepaired)),
                Passage::NoGuard(why) => {
                    tracing::warn!(id = call.id, attempt, "no second look at the mounts: {why}");
                    return Err(failure);
                }
            }
        }
        Err(failure)
    }

    async fn make_unguarded(&self, call: &Making<'_>, why: &str) -> Result<Created, RuntimeError> {
        if let Some(reason) = refusal_of_unseen(why, &call.terms.policy) {
            return Err(RuntimeError::Refused { reason });
        }
        tracing::warn!(id = call.id, "{why}: the container is made without a look at its mounts");
        let program = self.resolve_binary()?;
        let plain = Call::new(self, program, call.verb, call.args.clone());
        plain.run(Ends::Process(call.wiring)).await.map(|_| Created::default())
    }

    async fn pass(&self, guard: &Path, call: &Making<'_>, attempt: u32) -> Result<Passage, RuntimeError> {
        let (running, mut line) = match self.send_guard(guard, call, attempt) {
            Ok(sent) => sent,
            Err(error) => return Ok(Passage::NoGuard(error.to_string())),
        };
        let mut said = Vec::new();
        if tokio::time::timeout(call.terms.deadline, hear(&mut line, &mut said)).await.is_err() {
            self.abandon(running, &mut line, &mut said, call.id).await;
            return Ok(Passage::NoGuard(format!("no answer within {:?}", call.terms.deadline)));
        }
        match word(&said) {
            Some(Word::Handover { verify }) => Ok(match running.finish().await {
                Ok(_) => Passage::Created(Created { is_worth_verifying: verify }),
                Err(error) => Passage::RuntimeFailed(error.beside(hear_reason(&mut line, &mut said).await)),
            }),
            other => {
                self.dismiss(running, KILL_GRACE).await;
                Ok(match other {
                    Some(Word::Refused(reason)) => Passage::Refused(reason),
                    Some(Word::Unchanged) => Passage::Unchanged(hear_reason(&mut line, &mut said).await),
                    _ => Passage::NoGuard(format!("it said {:?}", String::from_utf8_lossy(&said))),
                })
            }
        }
    }

    fn send_guard(&self, guard: &Path, call: &Making<'_>, attempt: u32) -> io::Result<(Running, pipe::Receiver)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let line = pipe::Receiver::from_owned_fd(read)?;
        let mut request = Call::new(self, guard.to_owned(), call.verb, call.args.clone());
        request.env("BINDGUARD_RUNTIME", &self.binary);
        request.env("BINDGUARD_HANDOVER_FD", write.as_raw_fd().to_string());
        request.env("BINDGUARD_ATTEMPT", attempt.to_string());
        // A probe that the guard forked holds the container's streams: it has to go together with a guard that is late.
        request.lead_group();
        request.keep(write);
        let running = request.spawn(Ends::Process(call.wiring)).map_err(io::Error::other)?;
        Ok((running, line))
    }

    /// Kills a guard that is late. It may, at the very last moment, have become the runtime: then what it began must
    /// go before the runtime is run again.
    async fn abandon(&self, running: Running, line: &mut pipe::Receiver, said: &mut Vec<u8>, id: &str) {
        running.kill_group();
        self.dismiss(running, KILL_GRACE).await;
        let _ = line.try_read_buf(said);
        if matches!(word(said), Some(Word::Handover { .. })) || self.knows(id) {
            self.clear_away(id).await;
        }
    }

    /// Lets a guard that has nothing more to do end. One that hangs in the kernel cannot even be killed: it is left to
    /// a task of its own and never waited for here.
    async fn dismiss(&self, running: Running, grace: Duration) {
        let ended = tokio::time::timeout(grace, running.ended()).await.is_ok();
        running.forward_log();
        if !ended {
            running.kill_group();
            tokio::spawn(async move { running.ended().await });
        }
    }

    /// Removes what a failed create left, so that the next one finds the name free.
    pub(crate) async fn clear_away(&self, id: &str) {
        let _ = std::fs::remove_file(self.bundle.init_pid_file());
        if let Err(error) = self.force_delete(id).await {
            // crun calls it an error when there is nothing to remove.
            if self.knows(id) {
                tracing::warn!(id, %error, "cannot remove what a failed create left");
            }
        }
    }
}

/// Beside the shim first: the two belong together, and PATH may hold another version.
pub(super) fn guard_program() -> Option<PathBuf> {
    let beside = std::fs::read_link("/proc/self/exe").ok().and_then(|exe| Some(exe.parent()?.join(GUARD)));
    beside.filter(|path| is_program(path)).or_else(|| look_up(GUARD))
}
