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
//!
//! Before `Create` is answered, a proof shows that the runtime mounted what the spec says: until
//! `Start` no program of the container runs. The shim compares the container's mount table with the record that the guard left in the bundle.
//! The kernel prints the table without a call to any filesystem, and without a lock that a process
//! of the container can hold. If the shim finds a difference, or the table is long,
//! `bindguard-runtime` compares in full in a process of its own: it opens the sources again,
//! writes the journal, and knows the policy.
//!
//! The shim has no code for binds. The shim's event loop writes no journal, because the journal's
//! file server may hang. If there is no guard, a thread writes the line.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::handover::{
    self, DETACH_VERB, GuardAnswer, MAX_ANSWER, PROVE_VERB, UNCHECKED_VERB, WRAPPER, unrepaired_in,
};
use bindguard_core::identity::Identity;
use bindguard_core::judge::{refusal_of_uncompared, refusal_of_unseen};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::policy::Policy;
use bindguard_core::proof::{Comparison, EXPECTED_FILE, ExpectedBinds};
use bindguard_core::report::{CreateLine, Report, Unchecked};
use bindguard_sys::files;
use bindguard_sys::journal::append;
use rustix::pipe::{PipeFlags, pipe_with};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Take};
use tokio::net::unix::pipe;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{Result, RunStreams, Running, Runtime, RuntimeCall, RuntimeError, is_program, look_up};
use crate::io::PreparedIo;
use crate::kernel;
use crate::work::{run_blocking, spawn, spawn_thread};

const RETRIES: u32 = 3;
/// The time limit for the end of a killed guard, which may have become the runtime.
const KILL_GRACE: Duration = Duration::from_millis(500);
/// For the second line, which is written together with the first: the pipe closes when the runtime
/// begins.
const REST_LIMIT: Duration = Duration::from_millis(500);

/// A call of `create` or `restore`, which make the container. Both go through the guard if there is
/// one.
pub struct NewContainer<'a> {
    pub verb: &'static str,
    /// The verb's own.
    pub args: Vec<OsString>,
    pub prepared_io: &'a PreparedIo,
    pub settings: &'a GuardSettings,
}

/// The settings of the guard, and the facts for a container that it could not check.
pub struct GuardSettings {
    pub container: Identity,
    pub deadline: Duration,
    /// Decides whether an unchecked container is refused.
    pub policy: Policy,
    /// For a create without a guard; a guard writes its own line.
    pub journal: Option<PathBuf>,
}

/// The result of a run of the guard that does not refuse the container.
enum GuardResult {
    Created {
        is_provable: bool,
    },
    RuntimeFailed(RuntimeError),
    /// The reason for the bind that the guard left as it was.
    Unchanged(Option<String>),
    /// No runtime ran, for this reason.
    NoGuard(String),
}

impl Runtime {
    /// Makes the container. Returns true if the bundle has a record of the container's mounts: see
    /// [`Runtime::prove`].
    pub async fn make(&self, mut call: NewContainer<'_>) -> Result<bool> {
        let args = &mut call.args;
        args.extend(["--bundle".into(), (&self.bundle.path).into()]);
        self.add_process(args, &self.bundle.init_pid_file(), call.prepared_io);
        let made = self.run_through_guard(&call).await;
        made.map_err(|error| error.into_final(call.prepared_io))
    }

    async fn run_through_guard(&self, call: &NewContainer<'_>) -> Result<bool> {
        self.resolve_binary().await?;
        let Some(guard) = guard_program().await else {
            let why = format!("{WRAPPER} is not installed");
            self.record_missing_guard(call.settings, &why);
            return self.run_unguarded(call, &why).await;
        };
        let id = &self.id;
        let mut attempt = 0;
        let mut failure: Option<RuntimeError> = None;
        loop {
            let failed = match (self.run_guard(&guard, call, attempt).await?, failure) {
                (GuardResult::Created { is_provable }, before) => {
                    if let Some(before) = before {
                        log::info!(
                            id:%, attempt:%;
                            "created after a mount was repaired; before: {before}"
                        );
                    }
                    return Ok(is_provable);
                }
                (GuardResult::RuntimeFailed(failed), _) => failed,
                (GuardResult::Unchanged(unrepaired), Some(failure)) => {
                    return Err(failure.with_unrepaired(unrepaired));
                }
                (GuardResult::Unchanged(_), None) => {
                    let why = "the guard answered as for a retry";
                    return self.run_unguarded(call, why).await;
                }
                (GuardResult::NoGuard(why), Some(failure)) => {
                    log::warn!(id:%, attempt:%; "no second check of the mounts: {why}");
                    return Err(failure);
                }
                (GuardResult::NoGuard(why), None) => {
                    let why = format!("the guard did not hand over ({why})");
                    return self.run_unguarded(call, &why).await;
                }
            };
            if attempt == RETRIES {
                return Err(failed);
            }
            attempt += 1;
            failure = Some(failed);
            self.remove_failed_create().await;
            call.prepared_io.withhold_output();
        }
    }

    async fn run_unguarded(&self, call: &NewContainer<'_>, why: &str) -> Result<bool> {
        if let Some(reason) = refusal_of_unseen(why, &call.settings.policy) {
            return Err(RuntimeError::refused(&reason));
        }
        let id = &self.id;
        log::warn!(id:%; "{why}: the container is created without a check of its mounts");
        // A guard that broke, or was killed when it had become the runtime, may have written to the
        // container's stderr.
        if let Some(output) = call.prepared_io.last_output() {
            log::warn!(id:%; "the guard's last output: {output}");
        }
        let plain = self.call(call.verb, call.args.clone()).await?;
        let streams = RunStreams::Process(call.prepared_io);
        plain.spawn(streams)?.finish().await.map(|_| false)
    }

    async fn run_guard(
        &self,
        guard: &Path,
        call: &NewContainer<'_>,
        attempt: u32,
    ) -> Result<GuardResult> {
        let (running, answers) = match self.spawn_guard(guard, call, attempt) {
            Ok(spawned) => spawned,
            Err(error) => return Ok(GuardResult::NoGuard(error.to_string())),
        };
        let mut answers = BufReader::new(answers.take(MAX_ANSWER as u64));
        let mut received = Vec::new();
        let deadline = call.settings.deadline;
        let read = answers.read_until(b'\n', &mut received);
        let (how, why) = if let Ok(read) = timeout(deadline, read).await {
            if let Err(error) = read {
                log::warn!(error:%; "cannot read the guard's answer");
            }
            let answer = parse_answer(&received);
            if let Some(GuardAnswer::Handover { prove }) = answer {
                return Ok(match running.finish().await {
                    Ok(_) => GuardResult::Created { is_provable: prove },
                    Err(error) => {
                        let unrepaired = read_unrepaired(&mut answers, &mut received).await;
                        GuardResult::RuntimeFailed(error.with_unrepaired(unrepaired))
                    }
                });
            }
            let _ = running.finish_within(KILL_GRACE).await;
            match answer {
                Some(GuardAnswer::Refused(reason)) => return Err(RuntimeError::refused(&reason)),
                Some(GuardAnswer::Unchanged) => {
                    let unrepaired = read_unrepaired(&mut answers, &mut received).await;
                    return Ok(GuardResult::Unchanged(unrepaired));
                }
                _ => {}
            }
            let received = String::from_utf8_lossy(&received);
            (Unchecked::Died, format!("unexpected answer {received:?}"))
        } else {
            running.kill_group();
            let _ = running.finish_within(KILL_GRACE).await;
            let _ = answers.get_mut().get_mut().try_read_buf(&mut received);
            // At the very last moment the guard may have become the runtime: then the container that
            // it began must be removed before the runtime runs again.
            if matches!(parse_answer(&received), Some(GuardAnswer::Handover { .. }))
                || self.knows_container()
            {
                self.remove_failed_create().await;
            }
            (Unchecked::Late, format!("no answer within {deadline:?}"))
        };
        let mut more: Vec<OsString> = vec![
            attempt.to_string().into(),
            how.into_str().into(),
            (&why).into(),
        ];
        // In a retry the create fails with the runtime's own error.
        if attempt == 0 {
            more.extend(refusal_of_unseen(&why, &call.settings.policy).map(OsString::from));
        }
        self.spawn_record(guard, UNCHECKED_VERB, more);
        Ok(GuardResult::NoGuard(why))
    }

    fn spawn_guard(
        &self,
        guard: &Path,
        call: &NewContainer<'_>,
        attempt: u32,
    ) -> io::Result<(Running, pipe::Receiver)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let answers = pipe::Receiver::from_owned_fd(read)?;
        let mut request = RuntimeCall::new(self, guard.to_owned(), call.verb, call.args.clone());
        request
            .command
            .env(handover::RUNTIME_VARIABLE, &self.binary)
            .env(handover::PIPE_VARIABLE, write.as_raw_fd().to_string())
            .env(handover::ATTEMPT_VARIABLE, attempt.to_string())
            // A probe that the guard forked holds the container's streams: it must be killed
            // together with a late guard.
            .process_group(0);
        kernel::inherit(&mut request.command, write);
        let running = request
            .spawn(RunStreams::Process(call.prepared_io))
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

/// The guard's end of the pipe.
type Answers = BufReader<Take<pipe::Receiver>>;

/// Reads the rest, and returns a reason for which the runtime can have failed.
async fn read_unrepaired(answers: &mut Answers, received: &mut Vec<u8>) -> Option<String> {
    let _ = timeout(REST_LIMIT, answers.read_to_end(received)).await;
    unrepaired_in(&String::from_utf8_lossy(received)).map(str::to_owned)
}

/// The answer in the first line of the received bytes; `None` if there is none. Only the first word
/// is checked, so that a later guard may add more.
fn parse_answer(received: &[u8]) -> Option<GuardAnswer> {
    let line = received.split(|byte| *byte == b'\n').next()?;
    GuardAnswer::parse(&String::from_utf8_lossy(line))
}

/// A longer table is compared by a process of its own, so that the shim's memory stays small.
const MAX_MOUNTS: usize = 300;
/// The size limit of the table and of the record, in bytes.
const MAX_TEXT: u64 = 256 << 10;

/// Time limit of the process that writes a line of the journal.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of the process that detaches mounts. containerd gives up after ten seconds.
const DETACH_TIMEOUT: Duration = Duration::from_secs(7);

/// The threads that write lines: a hanging write keeps its thread.
static LINES: Semaphore = Semaphore::const_new(8);

impl Runtime {
    /// Compares the mounts of the new container with this init with the record in its bundle. The
    /// comparison in full takes at most as long as a guard may.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub async fn prove(&self, pid: u32, settings: &GuardSettings) -> Result<()> {
        if shows_all_expected_binds(&self.bundle.path, pid).is_ok_and(|shows_all| shows_all) {
            return Ok(());
        }
        let compared = self.prove_in_full(pid, settings.deadline).await;
        let reason = compared.unwrap_or_else(|why| {
            log::warn!(id:% = self.id; "the mounts of the container are not proven: {why}");
            refusal_of_uncompared(&why, &settings.policy)
        });
        reason.map_or(Ok(()), |reason| Err(RuntimeError::refused(&reason)))
    }

    /// The reason why policy refuses the container, if it does. A comparison that came to no end is
    /// recorded.
    async fn prove_in_full(&self, pid: u32, limit: Duration) -> Result<Option<String>, String> {
        let guard = guard_program().await.ok_or("the guard is not installed")?;
        let compare = async {
            let running = self
                .spawn_besides(&guard, PROVE_VERB, vec![pid.to_string().into()])
                .map_err(|error| error.to_string())?;
            let printed = match running.finish_within(limit).await {
                Some(printed) => printed.map_err(|error| error.to_string())?,
                None => return Err(format!("no answer within {limit:?}")),
            };
            let reason = String::from_utf8_lossy(&printed).trim().to_owned();
            Ok(Some(reason).filter(|reason| !reason.is_empty()))
        };
        compare.await.inspect_err(|why| {
            let more = vec![pid.to_string().into(), why.into()];
            self.spawn_record(&guard, PROVE_VERB, more);
        })
    }

    /// Detaches the mounts below the emptyDirs of the pod whose sandbox this was.
    pub async fn detach_below_emptydirs(&self) {
        let id = &self.id;
        let Some(guard) = guard_program().await else {
            return;
        };
        match self.spawn_besides(&guard, DETACH_VERB, vec![]) {
            Ok(running) => {
                if running.finish_within(DETACH_TIMEOUT).await.is_none() {
                    log::warn!(id:%; "{DETACH_VERB} did not end in time");
                }
            }
            Err(error) => log::warn!(id:%, error:%; "cannot run {DETACH_VERB}"),
        }
    }

    /// Starts to record that this create has no guard.
    fn record_missing_guard(&self, settings: &GuardSettings, why: &str) {
        let (Some(journal), Ok(slot)) = (settings.journal.clone(), LINES.try_acquire()) else {
            return;
        };
        let mut report = Report::about_bundle(&self.bundle.path);
        report.container = settings.container.clone();
        report
            .problems
            .push(format!("no guard checked this create: {why}"));
        let mut line = CreateLine::new(&report);
        line.time = OffsetDateTime::now_utc().format(&Rfc3339).ok();
        line.id = Some(self.id.clone());
        line.refused = refusal_of_unseen(why, &settings.policy);
        line.unchecked = Some(Unchecked::Missing);
        let text = serde_json::to_string(&line).unwrap_or_default();
        let write = move || {
            if let Err(error) = append(&journal, &text) {
                log::warn!("{}", error_chain(&error));
            }
            drop(slot);
        };
        if let Err(error) = spawn_thread(write) {
            log::warn!(error:%; "cannot start a thread for a line of the journal");
        }
    }

    /// Starts a verb that writes a line of the journal. A verb that hangs is killed.
    fn spawn_record(&self, guard: &Path, verb: &'static str, more: Vec<OsString>) {
        match self.spawn_besides(guard, verb, more) {
            Ok(running) => drop(spawn(async move {
                let _ = running.finish_within(RECORD_TIMEOUT).await;
            })),
            Err(error) => log::warn!(id:% = self.id, error:%; "cannot run {verb} of the guard"),
        }
    }

    /// Starts a verb of bindguard's own for this bundle.
    fn spawn_besides(
        &self,
        guard: &Path,
        verb: &'static str,
        more: Vec<OsString>,
    ) -> Result<Running> {
        let bundle = &self.bundle.path;
        let mut args = vec!["--bundle".into(), bundle.into(), (&self.id).into()];
        args.extend(more);
        let mut call = RuntimeCall::new(self, guard.to_owned(), verb, args);
        call.command.process_group(0);
        call.spawn(RunStreams::CapturedStdout)
    }
}

/// True if each bind of the record is in the container's mount table. An error if the table is too
/// long, or the container ended.
fn shows_all_expected_binds(bundle: &Path, pid: u32) -> io::Result<bool> {
    let mut record = Vec::new();
    File::open(bundle.join(EXPECTED_FILE))?
        .take(MAX_TEXT)
        .read_to_end(&mut record)?;
    let expected: ExpectedBinds = serde_json::from_slice(&record)?;
    drop(record);
    let mut comparison = Comparison::new(&expected);
    let table = File::open(format!("/proc/{pid}/mountinfo"))?;
    let mut table = io::BufReader::with_capacity(4 << 10, table.take(MAX_TEXT));
    let mut line = Vec::new();
    let mut mounts = 0;
    while table.read_until(b'\n', &mut line)? > 0 {
        mounts += 1;
        if mounts > MAX_MOUNTS || line.pop() != Some(b'\n') {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mount = MountEntry::from_line(&line).map_err(io::Error::other)?;
        comparison.add(&mount);
        line.clear();
    }
    // A program below the guard wrote config.json: the comparison in full counts what it added.
    let is_admitted = expected.spec == files::spec_version(bundle);
    let shows_all = is_admitted && comparison.differences().is_empty();
    if shows_all {
        files::add_mounts_before(bundle, expected);
    }
    Ok(shows_all)
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
            let answers = pipe::Receiver::from_owned_fd(read.into()).unwrap();
            let mut answers = BufReader::new(answers.take(MAX_ANSWER as u64));
            io::Write::write_all(&mut { write }, sent.as_bytes()).unwrap();
            let mut received = Vec::new();
            answers.read_until(b'\n', &mut received).await.unwrap();
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

#[cfg(test)]
mod proof_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::Arc;

    use bindguard_core::policy::{Alarm, Policy};

    use super::*;
    use crate::bundle::Bundle;
    use crate::bundle::Options;
    use crate::exits::Exits;

    /// No guard is beside the test's program.
    #[tokio::test]
    async fn policy_refuses_a_container_that_no_program_can_compare() {
        let bundle = tempfile::tempdir().unwrap();
        let runtime = Runtime::new(
            &Options::default(),
            "default",
            "c",
            Bundle::at(bundle.path()),
            Arc::new(Exits::default()),
        );
        let prove = |proof| {
            let settings = GuardSettings {
                container: Identity::default(),
                deadline: Duration::from_secs(60),
                policy: Policy {
                    proof,
                    ..Policy::default()
                },
                journal: None,
            };
            let runtime = &runtime;
            async move { runtime.prove(std::process::id(), &settings).await }
        };
        assert!(prove(Alarm::Report).await.is_ok());
        let refused = prove(Alarm::Refuse).await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.starts_with("refused by bindguard: "), "{refused}");
    }
}
