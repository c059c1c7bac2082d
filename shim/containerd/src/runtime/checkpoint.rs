//! `checkpoint` and `restore`: the runtime lets criu write a container into a directory, and create
//! it again from there.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use containerd_shim_protos::shim::oci::CheckpointOptions;

use super::Runtime;
use super::guard::{Created, NewContainer};
use super::invoke::RuntimeError;

impl Runtime {
    /// Writes a running or paused container. `parent` is empty if the images are complete.
    pub(crate) async fn checkpoint(
        &self,
        id: &str,
        options: &CheckpointOptions,
        parent: &str,
    ) -> Result<(), RuntimeError> {
        let args = checkpoint_args(options, parent);
        self.run("checkpoint", args.into_iter().chain([id.into()]))
            .await
    }

    /// Creates a container from a checkpoint, admitted by the guard if there is one; it runs at
    /// once. criu works and logs in `work`.
    pub(crate) async fn restore(
        &self,
        images: &str,
        parent: &str,
        work: &Path,
        container: &NewContainer<'_>,
    ) -> Result<Created, RuntimeError> {
        let mut args = images_args(images, work.as_ref(), parent);
        // The shim is the subreaper: the restored process becomes its child.
        args.extend(["--detach".into(), "--no-subreaper".into()]);
        self.create_or_restore("restore", args, container).await
    }
}

fn images_args(images: &str, work: &OsStr, parent: &str) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["--image-path".into(), images.into()];
    args.extend(["--work-path".into(), work.into()]);
    if !parent.is_empty() {
        args.extend(["--parent-path".into(), parent.into()]);
    }
    args
}

fn checkpoint_args(options: &CheckpointOptions, parent: &str) -> Vec<OsString> {
    let mut args = images_args(&options.image_path, options.work_path.as_ref(), parent);
    let flags = [
        (options.open_tcp, "--tcp-established"),
        (options.external_unix_sockets, "--ext-unix-sk"),
        (options.terminal, "--shell-job"),
        (options.file_locks, "--file-locks"),
        (!options.exit, "--leave-running"),
    ];
    let wanted = flags.into_iter().filter(|(is_wanted, _)| *is_wanted);
    args.extend(wanted.map(|(_, flag)| flag.into()));
    let namespaces = options.empty_namespaces.iter();
    args.extend(namespaces.flat_map(|kind| ["--empty-ns".into(), kind.into()]));
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_its_flag() {
        let options = CheckpointOptions {
            image_path: "/i".into(),
            work_path: "/w".into(),
            ..CheckpointOptions::default()
        };
        assert_eq!(
            checkpoint_args(&options, ""),
            ["--image-path", "/i", "--work-path", "/w", "--leave-running"]
        );
        let all = CheckpointOptions {
            exit: true,
            open_tcp: true,
            external_unix_sockets: true,
            terminal: true,
            file_locks: true,
            empty_namespaces: vec!["network".into()],
            ..options
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
        assert_eq!(checkpoint_args(&all, "../before")[4..], flags);
    }
}
