//! `create`.

use std::ffi::OsString;

use super::Runtime;
use super::guard::{Created, GuardSettings, GuardedCall};
use super::invoke::RuntimeError;
use crate::io::PreparedIo;

/// The arguments of `create`.
pub(crate) struct CreateCall<'a> {
    /// The container.
    pub(crate) id: &'a str,
    /// Its streams.
    pub(crate) prepared_io: &'a PreparedIo,
    /// chroot instead of pivot_root.
    pub(crate) no_pivot_root: bool,
    /// Keep the session keyring.
    pub(crate) no_new_keyring: bool,
    /// The guard's settings.
    pub(crate) settings: &'a GuardSettings,
}

impl Runtime {
    /// Creates the container, through the guard if a guard is installed.
    pub(crate) async fn create(&self, call: &CreateCall<'_>) -> Result<Created, RuntimeError> {
        let CreateCall {
            id,
            prepared_io,
            settings,
            ..
        } = *call;
        self.create_or_restore(&GuardedCall {
            verb: "create",
            args: self.create_args(call),
            id,
            prepared_io,
            settings,
        })
        .await
    }

    fn create_args(&self, call: &CreateCall<'_>) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["--bundle".into(), self.bundle.path().into()];
        args.extend(["--pid-file".into(), self.bundle.init_pid_file().into()]);
        if let Some(socket) = call.prepared_io.console_socket() {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        args.extend(call.no_pivot_root.then(|| "--no-pivot".into()));
        args.extend(call.no_new_keyring.then(|| "--no-new-keyring".into()));
        args.push(call.id.into());
        args
    }
}
