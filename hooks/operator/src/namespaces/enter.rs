//! Reads the mounts of a namespace without processes. Before Linux 6.11 a thread enters it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread;

use bindguard_core::mount_table::MountTable;
use bindguard_sys::ReadTableError;
use bindguard_sys::enter::{mounts_in, open_process_file};
use bindguard_sys::process_files::ProcessFile;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::UnreadTable;

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

/// The mounts of the namespace that a file refers to.
pub(super) fn mounts_of_namespace(file: &NamespaceFile) -> Result<MountTable, UnreadTable> {
    let failed = |call: &'static str, source: io::Error| UnreadTable::Call {
        call,
        file: file.path().to_owned(),
        source,
    };
    let namespace = file.open().map_err(|error| failed("open", error))?;
    mounts_in(&namespace, || open_table(&namespace)).map_err(|error| match error {
        ReadTableError::Read(source) => failed("read the mounts of", source),
        ReadTableError::Table(source) => source.into(),
    })
}

/// The mountinfo of a namespace, opened by a thread that enters it.
fn open_table(namespace: &File) -> io::Result<File> {
    let open = || {
        // Open the thread's own directory before: inside, there may be no /proc.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own = rustix::fs::open("/proc/thread-self", flags, Mode::empty())?;
        // setns(2) fails while threads share a root directory.
        unshare(CloneFlags::CLONE_FS)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let table = rustix::fs::openat(&own, "mountinfo", flags, Mode::empty())?;
        Ok(File::from(table))
    };
    thread::scope(|scope| {
        let panicked = |_| Err(io::Error::other("the thread panicked"));
        scope.spawn(open).join().unwrap_or_else(panicked)
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
            matches!(&table, Some(Err(UnreadTable::Call { call, .. })) if ["open", "read the mounts of"].contains(call)),
            "{table:?}"
        );
        let namespaces = unless_it_hangs(|| Proc::default().namespaces());
        assert!(matches!(&namespaces, Some(Ok(_))), "{namespaces:?}");
    }
}
