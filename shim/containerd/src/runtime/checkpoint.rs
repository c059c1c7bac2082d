//! `checkpoint` and `restore`: the runtime lets criu write a container into a directory, and create
//! it again from there.

use std::ffi::OsString;
use std::path::PathBuf;

use super::Runtime;
use super::guard::{Created, GuardSettings, GuardedCall};
use super::invoke::RuntimeError;
use crate::io::PreparedIo;

/// The arguments of `checkpoint`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckpointCall {
    /// The directory for the images.
    pub(crate) images: PathBuf,
    /// The parent images; empty if the images are complete.
    pub(crate) parent: String,
    /// The directory in which criu works and logs.
    pub(crate) work: PathBuf,
    /// True if the container ends after the checkpoint.
    pub(crate) exit: bool,
    /// Connections of the container may be open.
    pub(crate) open_tcp: bool,
    /// Unix sockets may be connected to the outside.
    pub(crate) external_unix_sockets: bool,
    /// The container may have a terminal.
    pub(crate) terminal: bool,
    /// The container may hold locks on files.
    pub(crate) file_locks: bool,
    /// Kinds of namespaces that are created again instead of written.
    pub(crate) empty_namespaces: Vec<String>,
}

/// The arguments of `restore`.
pub(crate) struct RestoreCall<'a> {
    /// The directory of the images.
    pub(crate) images: &'a str,
    /// The parent images; empty if the images are complete.
    pub(crate) parent: &'a str,
    /// The directory in which criu works and logs.
    pub(crate) work: PathBuf,
    /// chroot instead of pivot_root.
    pub(crate) no_pivot_root: bool,
    /// The process's streams.
    pub(crate) prepared_io: &'a PreparedIo,
    /// The guard's settings.
    pub(crate) settings: &'a GuardSettings,
}

impl CheckpointCall {
    fn args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["--image-path".into(), self.images.clone().into()];
        args.extend(["--work-path".into(), self.work.clone().into()]);
        if !self.parent.is_empty() {
            args.extend(["--parent-path".into(), self.parent.clone().into()]);
        }
        let flags = [
            (self.open_tcp, "--tcp-established"),
            (self.external_unix_sockets, "--ext-unix-sk"),
            (self.terminal, "--shell-job"),
            (self.file_locks, "--file-locks"),
            (!self.exit, "--leave-running"),
        ];
        args.extend(
            flags
                .into_iter()
                .filter(|(wanted, _)| *wanted)
                .map(|(_, flag)| flag.into()),
        );
        args.extend(
            self.empty_namespaces
                .iter()
                .flat_map(|kind| ["--empty-ns".into(), kind.into()]),
        );
        args
    }
}

impl Runtime {
    /// Writes a running or paused container.
    pub(crate) async fn checkpoint(
        &self,
        id: &str,
        call: &CheckpointCall,
    ) -> Result<(), RuntimeError> {
        self.run("checkpoint", call.args().into_iter().chain([id.into()]))
            .await
    }

    /// Creates and starts a container from a checkpoint, through the guard if a guard is installed.
    pub(crate) async fn restore(
        &self,
        id: &str,
        call: &RestoreCall<'_>,
    ) -> Result<Created, RuntimeError> {
        let mut args: Vec<OsString> = vec!["--image-path".into(), call.images.into()];
        args.extend(["--work-path".into(), call.work.clone().into()]);
        if !call.parent.is_empty() {
            args.extend(["--parent-path".into(), call.parent.into()]);
        }
        args.extend([
            "--detach".into(),
            "--pid-file".into(),
            self.bundle.init_pid_file().into(),
        ]);
        if let Some(socket) = call.prepared_io.console_socket() {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        args.extend(call.no_pivot_root.then(|| "--no-pivot".into()));
        // The shim is the subreaper: the restored process becomes its child.
        args.extend([
            "--no-subreaper".into(),
            "--bundle".into(),
            self.bundle.path().into(),
            id.into(),
        ]);
        let RestoreCall {
            prepared_io,
            settings,
            ..
        } = *call;
        self.create_or_restore(&GuardedCall {
            verb: "restore",
            args,
            id,
            prepared_io,
            settings,
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_its_flag() {
        let call = CheckpointCall {
            images: "/i".into(),
            work: "/w".into(),
            ..CheckpointCall::default()
        };
        assert_eq!(
            call.args(),
            ["--image-path", "/i", "--work-path", "/w", "--leave-running"]
        );
        let all = CheckpointCall {
            parent: "../before".into(),
            exit: true,
            open_tcp: true,
            external_unix_sockets: true,
            terminal: true,
            file_locks: true,
            empty_namespaces: vec!["network".into()],
            ..call
        };
        let flags = [
            "--parent-path",
            "../before",
            "--tcp-established",
            "--ext-unix-sk",
            "--shell-job",
            "--file-locks",
            "--empty-ns",
            "network",
        ];
        assert_eq!(all.args()[4..], flags);
    }
}
