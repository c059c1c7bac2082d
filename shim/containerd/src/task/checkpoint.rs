//! `Checkpoint`, and the `Start` of a container that is created from a checkpoint.
//!
//! A restored container has no time between its creation and its start: criu creates it running. So
//! `Create` only opens its streams, answers with pid 0 and keeps the parameters. `Start` lets the
//! runtime restore it.
//!
//! A client of containerd may name the directory of the images in its options. containerd copies
//! the directory into the request, but 1.x does so only if the runtime's name begins with
//! `io.containerd.runc`. Under any other name the shim must read the options.

use std::fs;
use std::mem::swap;
use std::path::Path;
use std::sync::Arc;

use containerd_shim_protos::api::{CheckpointTaskRequest, CreateTaskRequest};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, UnknownValueRef};

use super::create::guard_settings;
use super::{Task, TaskError};
use crate::blocking::{lock, run_blocking};
use crate::bundle::Bundle;
use crate::exits::Watched;
use crate::io::PreparedIo;
use crate::options::{Options, OptionsError};
use crate::runtime::NewContainer;

const OPTIONS_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
/// The type that clients of containerd 1.x send with a foreign runtime type. Its fields are the
/// same, but two are swapped.
const FIRST_OPTIONS_TYPE: &str = "containerd.linux.runc.CheckpointOptions";
/// The copy of criu's log, for after the removal of criu's own directory.
const DUMP_LOG: &str = "criu-dump.log";

/// The parameters that are kept from the `Create` to the `Start` of a container to restore.
pub struct Restoration {
    images: String,
    parent: String,
    no_pivot_root: bool,
    prepared_io: PreparedIo,
}

impl Task {
    /// Writes the container into a directory, with criu.
    pub async fn checkpoint(&self, request: CheckpointTaskRequest) -> Result<(), TaskError> {
        let mut options = decode(request.options.as_ref())?;
        let parent = parent_path(&options);
        options.image_path = images_directory(options.image_path, request.path);
        let _turn = self.turn.lock().await;
        self.init.state().admits_checkpoint()?;
        // A directory that the client names stays for the client to inspect.
        let is_own = options.work_path.is_empty();
        if is_own {
            options.work_path = self.bundle.work().join("criu-work").display().to_string();
        }
        let work = Path::new(&options.work_path);
        let mut done = Ok(());
        if let Err(source) = self.runtime.checkpoint(&self.id, &options, &parent).await {
            let log = self.bundle.path.join(DUMP_LOG);
            let (from, to) = (work.join("dump.log"), log.clone());
            // Away from the event loop: the client may have named any directory.
            let copied = run_blocking(move || fs::copy(from, to)).await;
            if let Err(error) = copied.and_then(|copied| copied) {
                tracing::debug!(id = self.id, %error, "criu left no log");
            }
            done = Err(TaskError::Checkpoint { source, log });
        }
        if is_own {
            let _ = fs::remove_dir_all(work);
        }
        done
    }

    /// Prepares a container for the restore at its start.
    pub(super) async fn prepare_restoration(
        &self,
        request: &CreateTaskRequest,
        options: &Options,
    ) -> Result<(), TaskError> {
        let restoration = Restoration {
            images: images_of(request, options).to_owned(),
            parent: request.parent_checkpoint.clone(),
            no_pivot_root: options.no_pivot_root,
            prepared_io: self.open_streams(&self.init).await?,
        };
        *lock(&self.restoration) = Some(restoration);
        Ok(())
    }

    /// Restores the init, if it waits for that; the caller holds its turn. After a failure the start
    /// may be tried again.
    pub(super) async fn restore(&self) -> Result<Option<Arc<Watched>>, TaskError> {
        let Some(from) = lock(&self.restoration).take() else {
            return Ok(None);
        };
        let restored = match self.run_restore(&from).await {
            Ok(watched) => self.attach_init(watched, from.prepared_io).map(Some),
            Err(error) => {
                *lock(&self.restoration) = Some(from);
                Err(error)
            }
        };
        if restored.is_err() {
            // A half-restored container is useless.
            self.runtime.remove_failed_create(&self.id).await;
        }
        restored
    }

    async fn run_restore(&self, from: &Restoration) -> Result<Arc<Watched>, TaskError> {
        let options = self.bundle.read_options()?;
        let work = match options.criu_work_path.as_str() {
            "" => self.bundle.work(),
            path => path.into(),
        };
        let settings = guard_settings(&self.bundle.spec()?).await;
        let pending = self.shared.exits.pending_process();
        let container = NewContainer {
            id: &self.id,
            prepared_io: &from.prepared_io,
            no_pivot_root: from.no_pivot_root,
            settings: &settings,
        };
        self.runtime
            .restore(&from.images, &from.parent, &work, &container)
            .await
            .map_err(TaskError::runtime("restore"))?;
        let pid = Bundle::read_pid(&self.bundle.init_pid_file())?;
        Ok(Arc::new(pending.watch(pid)?))
    }
}

/// The images of the new container; empty without a checkpoint.
pub fn images_of<'a>(request: &'a CreateTaskRequest, options: &'a Options) -> &'a str {
    if request.checkpoint.is_empty() {
        &options.images_to_restore
    } else {
        &request.checkpoint
    }
}

/// The directory for the images. The client expects the images in the directory that it names.
fn images_directory(named: String, offered: String) -> String {
    if named.is_empty() { offered } else { named }
}

/// The message's field 10, which the protos crate does not name yet.
fn parent_path(options: &CheckpointOptions) -> String {
    const PARENT_PATH: u32 = 10;
    match options.special_fields.unknown_fields().get(PARENT_PATH) {
        Some(UnknownValueRef::LengthDelimited(path)) => String::from_utf8_lossy(path).into_owned(),
        _ => String::new(),
    }
}

fn decode(any: Option<&Any>) -> Result<CheckpointOptions, TaskError> {
    let Some(any) = any.filter(|any| !any.type_url.is_empty()) else {
        return Ok(CheckpointOptions::default());
    };
    let kind = match any.type_url.rsplit('/').next() {
        Some(OPTIONS_TYPE) => OPTIONS_TYPE,
        Some(FIRST_OPTIONS_TYPE) => FIRST_OPTIONS_TYPE,
        _ => return Err(OptionsError::UnknownType(any.type_url.clone()).into()),
    };
    let mut options = CheckpointOptions::parse_from_bytes(&any.value)
        .map_err(|source| OptionsError::Malformed { kind, source })?;
    if kind == FIRST_OPTIONS_TYPE {
        swap(&mut options.work_path, &mut options.image_path);
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_in_the_options_is_used() {
        assert_eq!(
            images_directory(String::new(), "/tmp/ctrd-checkpoint1".into()),
            "/tmp/ctrd-checkpoint1"
        );
        assert_eq!(
            images_directory("/images".into(), "/tmp/ctrd-checkpoint1".into()),
            "/images"
        );

        let named = Options {
            images_to_restore: "/images".into(),
            ..Options::default()
        };
        let given = CreateTaskRequest {
            checkpoint: "/given".into(),
            ..CreateTaskRequest::default()
        };
        assert_eq!(images_of(&given, &named), "/given");
        assert_eq!(images_of(&CreateTaskRequest::default(), &named), "/images");
        assert_eq!(
            images_of(&CreateTaskRequest::default(), &Options::default()),
            ""
        );
    }

    #[test]
    fn options_by_their_type() {
        let any = |type_url: &str, value: &[u8]| Any {
            type_url: type_url.to_owned(),
            value: value.to_owned(),
            ..Default::default()
        };
        // exit, and fields 8 and 9
        let bytes = b"\x08\x01\x42\x01e\x4a\x01n";
        let options = decode(Some(&any(OPTIONS_TYPE, bytes))).unwrap();
        assert_eq!(
            (
                options.exit,
                options.image_path.as_str(),
                options.work_path.as_str()
            ),
            (true, "e", "n")
        );
        assert_eq!(parent_path(&options), "");
        let with_parent = decode(Some(&any(OPTIONS_TYPE, b"\x08\x01\x52\x03../"))).unwrap();
        assert_eq!(parent_path(&with_parent), "../");
        let first = decode(Some(&any(FIRST_OPTIONS_TYPE, bytes))).unwrap();
        assert_eq!(
            (
                first.exit,
                first.work_path.as_str(),
                first.image_path.as_str()
            ),
            (true, "e", "n")
        );
        assert_eq!(decode(None).unwrap(), CheckpointOptions::default());
        assert!(decode(Some(&any("containerd.runc.v1.Options", bytes))).is_err());
    }
}
