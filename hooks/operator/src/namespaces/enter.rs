//! Reads the mounts of a namespace without processes: a thread enters it, reads, and ends.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use bindguard_core::mount_table::MountTable;
use bindguard_sys::enter::open_process_file;
use bindguard_sys::process_files::ProcessFile;
use bindguard_sys::{ReadTableError, read_container_table};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{Mode, OFlags};

use super::UnreadTable;

/// Why the mounts of a namespace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadMountsError {
    /// A call failed.
    #[error("{call} {}", file.display())]
    Call {
        /// The call.
        call: &'static str,
        /// The file of the namespace.
        file: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The thread ended early.
    #[error("enter {}: the thread panicked", .0.display())]
    Panic(PathBuf),
}

/// A file that refers to a namespace without processes.
#[derive(Debug)]
pub(super) enum NamespaceFile {
    /// A mount of the reader's own namespace.
    BindMount(PathBuf),
    /// A descriptor of a process, which can block its readers.
    Descriptor(ProcessFile),
}

impl NamespaceFile {
    fn path(&self) -> &Path {
        match self {
            Self::BindMount(path) => path,
            Self::Descriptor(descriptor) => &descriptor.path,
        }
    }

    fn open(&self) -> io::Result<File> {
        match self {
            Self::BindMount(path) => File::open(path),
            Self::Descriptor(descriptor) => open_process_file(descriptor).map(File::from),
        }
    }
}

/// The mounts of the namespace that a file refers to, read by a thread that enters it.
pub(super) fn mounts_of_namespace(file: &NamespaceFile) -> Result<MountTable, UnreadTable> {
    let panicked = || Err(ReadMountsError::Panic(file.path().to_owned()).into());
    thread::scope(|scope| {
        scope
            .spawn(|| enter(file))
            .join()
            .unwrap_or_else(|_| panicked())
    })
}

fn enter(file: &NamespaceFile) -> Result<MountTable, UnreadTable> {
    let failed = |call: &'static str, source: io::Error| ReadMountsError::Call {
        call,
        file: file.path().to_owned(),
        source,
    };
    let namespace = file.open().map_err(|error| failed("open", error))?;
    // Open the thread's own directory before: inside, there may be no /proc.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = rustix::fs::open("/proc/thread-self", flags, Mode::empty());
    let own = own.map_err(|errno| failed("open /proc/thread-self to read", errno.into()))?;
    // setns(2) refuses a thread that shares its root directory with others.
    unshare(CloneFlags::CLONE_FS).map_err(|errno| failed("enter", errno.into()))?;
    setns(&namespace, CloneFlags::CLONE_NEWNS).map_err(|errno| failed("enter", errno.into()))?;
    let mountinfo = rustix::fs::openat(
        &own,
        "mountinfo",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let mountinfo = mountinfo.map_err(|errno| failed("read the mounts of", errno.into()))?;
    read_container_table(File::from(mountinfo)).map_err(|error| match error {
        ReadTableError::Read(source) => failed("read the mounts of", source).into(),
        ReadTableError::Table(source) => source.into(),
    })
}

#[cfg(test)]
mod tests {
    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

    use super::super::Proc;
    use super::*;

    /// A process can hang in execve(2) between the reading of its links and the open.
    #[test]
    fn a_process_that_hangs_in_execve_does_not_delay_the_survey() {
        let Some(executing) = Executing::start() else {
            return;
        };
        let pid = executing.pid();
        let table = unless_it_hangs(move || {
            mounts_of_namespace(&NamespaceFile::Descriptor(ProcessFile::of(pid, "fd/0")))
        });
        // A kernel that takes no lock opens the file, which is no namespace.
        assert!(
            matches!(&table, Some(Err(UnreadTable::Enter(ReadMountsError::Call { call, .. }))) if ["open", "enter"].contains(call)),
            "{table:?}"
        );
        let namespaces = unless_it_hangs(|| Proc::default().namespaces());
        assert!(matches!(&namespaces, Some(Ok(_))), "{namespaces:?}");
    }
}
