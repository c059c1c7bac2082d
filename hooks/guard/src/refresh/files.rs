//! The single files that a container engine bound, with their directories open while the container is refreshed (moby#15793).
//!
//! The host path is the one of the container's own spec. The directory is opened as the runtime would open it, the file beneath
//! it: a symlink in the directory that leads out of it is refused.

use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::FileKind;
use bindguard_core::mount_table::{Device, MountTable};
use bindguard_core::paths::below;
use bindguard_core::refresh::{BoundFile, SubpathInContainer, files_in_container};
use bindguard_core::spec::SpecView;
use bindguard_sys::{Handle, HandleError, MountError, Mounts, OpenedTarget, TargetError, open_name};

use super::current_files::CurrentFiles;

/// A bind of a spec whose source has a name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileBind {
    /// The directory of the source on the host.
    pub directory: PathBuf,
    /// The name of the source there.
    pub name: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
}

impl FileBind {
    /// The binds of a spec. Which of them are directories is seen when they are opened.
    pub fn of_spec(spec: &SpecView<'_>) -> Vec<Self> {
        let binds = spec.binds().iter().filter(|bind| bind.source().is_absolute());
        let named = binds.filter_map(|bind| {
            let (directory, name) = bind.source().parent().zip(bind.source().file_name())?;
            Some(Self {
                directory: directory.to_owned(),
                name: name.into(),
                destination: bind.destination().to_owned(),
            })
        });
        named.collect()
    }
}

/// Why a bound file cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum BoundFileError {
    /// Its directory could not be opened.
    #[error("open the directory of a bound file")]
    Open(#[from] HandleError),
    /// The directory's path could not be resolved.
    #[error("resolve {}", directory.display())]
    Resolve {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mount of the directory could not be read.
    #[error("find the mount of {}", directory.display())]
    Mount {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        #[source]
        source: MountError,
    },
    /// The directory is not below the mount that shows it.
    #[error("{} is not below its mount", .0.display())]
    NotBelow(PathBuf),
}

/// The single files that a container's spec binds.
#[derive(Debug)]
pub struct BoundFiles {
    files: Vec<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    bind: FileBind,
    directory: Handle,
    resolved: PathBuf,
    device: Device,
    place: PathBuf,
}

impl BoundFiles {
    /// Opens the directories of these binds, and returns the errors of those that cannot be followed. Binds of directories are
    /// left out.
    pub fn open(binds: Vec<FileBind>) -> (Self, Vec<BoundFileError>) {
        let mut errors = Vec::new();
        let opened = binds.into_iter().filter_map(|bind| match OpenFile::open(bind) {
            Ok(file) => Some(file),
            Err(error) => {
                errors.push(error);
                None
            }
        });
        let files = opened.filter(|file| !file.is_directory()).collect();
        (Self { files }, errors)
    }

    /// The binds that are followed.
    pub fn binds(&self) -> impl Iterator<Item = &FileBind> {
        self.files.iter().map(|file| &file.bind)
    }
}

impl CurrentFiles for BoundFiles {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let files: Vec<BoundFile> = self.files.iter().map(OpenFile::observe).collect();
        files_in_container(table, &files)
    }

    fn open_current(&self, directory: &Path, name: &Path) -> Option<Result<OpenedTarget, TargetError>> {
        let file = self.files.iter().find(|file| file.bind.directory == directory && file.bind.name == name)?;
        Some(open_name(&file.directory, name))
    }
}

impl OpenFile {
    fn open(bind: FileBind) -> Result<Self, BoundFileError> {
        let directory = Handle::follow(&bind.directory)?;
        let path = || bind.directory.clone();
        let mount = Mounts::default().mount_of(&directory);
        let mount = mount.map_err(|source| BoundFileError::Mount { directory: path(), source })?.entry;
        let resolved = directory.resolved_path();
        let resolved = resolved.map_err(|source| BoundFileError::Resolve { directory: path(), source })?;
        let place = mount.place_in_filesystem(&resolved).ok_or_else(|| BoundFileError::NotBelow(path()))?;
        Ok(Self { bind, directory, resolved, device: mount.device, place })
    }

    fn current(&self) -> Option<Handle> {
        open_name(&self.directory, &self.bind.name).ok()?.file
    }

    fn is_directory(&self) -> bool {
        let kind = self.current().and_then(|file| file.identity().ok()).map(|identity| identity.kind);
        kind == Some(FileKind::Directory)
    }

    fn observe(&self) -> BoundFile {
        let path = self.current().and_then(|file| file.resolved_path().ok());
        // A file that is replaced at this moment has no place: it counts as stale, and the next round sees the new one.
        let current = path.and_then(|path| below(&path, &self.resolved).map(|rest| self.place.join(rest)));
        let FileBind { directory, name, destination } = self.bind.clone();
        BoundFile { directory, name, destination, device: self.device, place: self.place.clone(), current }
    }
}
