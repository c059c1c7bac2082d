//! Reads the lines that the guard and the commands write into the journal.
//!
//! The journal is read when figures are requested, and after each change if events are written. The
//! position is kept in a file: after a restart the agent counts what was written meanwhile, and
//! nothing twice.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;
use std::{fs, io, thread};

use bindguard_core::error_chain;
use bindguard_core::report::{JournalLine, UnreadLine};
use bindguard_sys::{make_folders, write_new_file};
use tracing::{debug, warn};

use crate::limits::SayOnce;
use crate::sources::watch::{Inotify, WRITES, WatchEvent};

/// Limit of a read. The journal and the rotated journal have at most 4 MiB each.
const MAX_READ: u64 = 16 << 20;

/// Reads a journal from where it stopped.
#[derive(Debug)]
pub struct JournalReader {
    journal: PathBuf,
    record: PathBuf,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    position: Option<Position>,
    /// The position in the record, which may be older: the disk was full.
    recorded: Option<Position>,
    said: SayOnce,
}

impl JournalReader {
    /// A reader that continues at the recorded position, or without a record at the journal's end.
    pub fn new(journal: PathBuf, record: PathBuf) -> Self {
        let recorded = Position::read(&record);
        let progress = Progress {
            position: recorded.or_else(|| Position::end_of(&journal)),
            recorded,
            said: SayOnce::default(),
        };
        Self {
            journal,
            record,
            progress: progress.into(),
        }
    }

    /// Hands over the lines since the last call. It blocks for as long as the journal's filesystem;
    /// a second call does not.
    pub fn read_new(&self, mut take: impl FnMut(&Result<JournalLine, UnreadLine>)) {
        let mut progress = match self.progress.try_lock() {
            Ok(progress) => progress,
            Err(TryLockError::Poisoned(progress)) => progress.into_inner(),
            // An earlier call waits for the journal's filesystem.
            Err(TryLockError::WouldBlock) => return,
        };
        match self.read(&mut progress.position) {
            Ok(text) => {
                for line in text.lines() {
                    take(&JournalLine::parse(line));
                }
            }
            Err(error) => warn!("read {}: {error}", self.journal.display()),
        }
        // A record that could not be written is tried again at the next call.
        let Some(now) = progress
            .position
            .filter(|_| progress.position != progress.recorded)
        else {
            return;
        };
        let written = now.write(&self.record);
        if written.is_ok() {
            progress.recorded = Some(now);
        }
        // A full disk causes one warning, not a warning for each line.
        let failure = written.err().map(|error| {
            let (record, why) = (self.record.display(), error_chain(&error));
            format!("a restart may count admissions twice: write {record}: {why}")
        });
        progress.said.warn((), failure);
    }

    /// The whole lines since the position, also those of a journal that was renamed meanwhile.
    fn read(&self, position: &mut Option<Position>) -> io::Result<String> {
        let mut text = String::new();
        let Some((mut journal, inode)) = open(&self.journal)? else {
            return Ok(text);
        };
        let mut read = 0;
        match *position {
            Some(old) if old.inode == inode => read = old.offset,
            Some(old) => {
                let renamed = PathBuf::from(format!("{}.1", self.journal.display()));
                // If it was renamed twice since, its last lines are gone.
                if let Some((mut renamed, inode)) = open(&renamed)?
                    && inode == old.inode
                {
                    text = whole_lines(&mut renamed, old.offset)?.0;
                }
            }
            None => {}
        }
        let (lines, offset) = whole_lines(&mut journal, read)?;
        *position = Some(Position { inode, offset });
        Ok(text + &lines)
    }
}

/// A journal and its inode; `None` if there is no journal.
fn open(journal: &Path) -> io::Result<Option<(File, u64)>> {
    match File::open(journal) {
        Ok(file) => {
            let inode = file.metadata()?.ino();
            Ok(Some((file, inode)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The complete lines from an offset on, and the offset after the last complete line.
fn whole_lines(file: &mut File, offset: u64) -> io::Result<(String, u64)> {
    // A journal that is shorter was emptied in place.
    let is_shorter = file.metadata()?.len() < offset;
    let offset = if is_shorter { 0 } else { offset };
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    file.take(MAX_READ).read_to_end(&mut bytes)?;
    let last = bytes.iter().rposition(|byte| *byte == b'\n');
    bytes.truncate(last.map_or(0, |last| last + 1));
    let lines = String::from_utf8_lossy(&bytes).into_owned();
    Ok((lines, offset + bytes.len() as u64))
}

// Follows the journal between two requests for figures: an event shall not wait for Prometheus.
//
// The thread sleeps until something changes in the journal's directory. If events are off, the
// thread is not started.

/// Creates come in bursts: the journal is read once for a burst.
const PAUSE: Duration = Duration::from_millis(500);

/// Calls `changed` at first, after each change in the journal's directory, and every `interval`, for
/// ever: a filesystem may be mounted over the watched directory, or the directory cannot be watched.
pub fn follow_journal(journal: &Path, interval: Duration, mut changed: impl FnMut()) -> ! {
    loop {
        changed();
        let directory = journal.parent().unwrap_or(Path::new("/"));
        let why = match watch(directory, interval, &mut changed) {
            Ok(()) => "it is gone".to_owned(),
            Err(error) => error.to_string(),
        };
        let journal = journal.display();
        debug!("the directory of {journal} is not watched: {why}");
        thread::sleep(interval);
    }
}

/// Returns when the directory is removed.
fn watch(directory: &Path, interval: Duration, changed: &mut impl FnMut()) -> io::Result<()> {
    // The guard would create it at the first create with a finding.
    make_folders(directory, 0o755)?;
    let inotify = Inotify::new()?;
    loop {
        // Changes nothing, unless another directory is at the path now.
        inotify.watch(directory, WRITES)?;
        // A line that was written before the watch was there.
        changed();
        if !inotify.wait_with(None, interval)?.by_events {
            continue;
        }
        thread::sleep(PAUSE);
        // The names do not matter: a change of a different file costs only a query of the journal's
        // length.
        let events = inotify.read()?;
        let is_gone = |event: &WatchEvent| matches!(event, WatchEvent::Gone(_));
        if events.iter().any(is_gone) {
            changed();
            return Ok(());
        }
    }
}

// The position in the journal, kept over restarts of the agent.

/// The journal's file, which a rotation renames, and the number of bytes read of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    inode: u64,
    offset: u64,
}

impl Position {
    /// `None` if the record is missing or malformed.
    fn read(record: &Path) -> Option<Self> {
        let text = fs::read_to_string(record).ok()?;
        let (inode, offset) = text.trim().split_once(' ')?;
        Some(Self {
            inode: inode.parse().ok()?,
            offset: offset.parse().ok()?,
        })
    }

    /// The end of the journal at this moment; `None` without a journal.
    fn end_of(journal: &Path) -> Option<Self> {
        let metadata = fs::metadata(journal).ok()?;
        Some(Self {
            inode: metadata.ino(),
            offset: metadata.len(),
        })
    }

    /// Replaces the record as a whole.
    fn write(self, record: &Path) -> io::Result<()> {
        let new = record.with_extension("new");
        let text = format!("{} {}\n", self.inode, self.offset);
        write_new_file(&new, text.as_bytes(), 0o600)?;
        fs::rename(new, record)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::io::Write;

    use super::*;
    use crate::sinks::metrics::Metrics;

    struct Scene {
        folder: tempfile::TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let scene = Self {
                folder: tempfile::tempdir().unwrap(),
            };
            fs::write(scene.journal(), "").unwrap();
            scene
        }

        fn journal(&self) -> PathBuf {
            self.folder.path().join("journal.jsonl")
        }

        fn append(&self, text: &str) {
            let mut file = File::options()
                .append(true)
                .create(true)
                .open(self.journal())
                .unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }

        fn rotate(&self) {
            fs::rename(self.journal(), self.folder.path().join("journal.jsonl.1")).unwrap();
        }

        fn reader(&self) -> JournalReader {
            JournalReader::new(self.journal(), self.folder.path().join("position"))
        }
    }

    const LINE: &str = "{\"version\":1,\"time\":null,\"attempt\":0,\"binds\":[],\"foreign\":0,\"duration_us\":400}\n";

    fn count(reader: &JournalReader, metrics: &Metrics) {
        reader.read_new(|line| metrics.journaled(line));
    }

    fn admissions(metrics: &Metrics) -> String {
        let text = metrics.text().unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("bindguard_admission_seconds_count "));
        line.unwrap_or("none").to_owned()
    }

    #[test]
    fn every_line_is_counted_once_across_rotation_and_restart() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        scene.append(LINE);
        let reader = scene.reader();
        count(&reader, metrics);
        assert_eq!(
            admissions(metrics),
            "0",
            "what was there before the first start is not counted"
        );
        scene.append(LINE);
        count(&reader, metrics);
        scene.append(LINE);
        scene.rotate();
        scene.append(LINE);
        count(&reader, metrics);
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "3");
        drop(reader);
        scene.append(LINE);
        let reader = scene.reader();
        count(&reader, metrics);
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "4");
    }

    /// The disk of the record was full, and has room again before the next line comes.
    #[test]
    fn a_position_that_could_not_be_written_is_written_later() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        let [folder, away] = ["disk", "away"].map(|name| scene.folder.path().join(name));
        fs::create_dir(&folder).unwrap();
        let reader = || JournalReader::new(scene.journal(), folder.join("position"));
        let first = reader();
        scene.append(LINE);
        count(&first, metrics);
        fs::rename(&folder, &away).unwrap();
        scene.append(LINE);
        count(&first, metrics);
        fs::rename(&away, &folder).unwrap();
        count(&first, metrics);
        count(&reader(), metrics);
        assert_eq!(
            admissions(metrics),
            "2",
            "the next agent counts a line again"
        );
    }

    /// The wall clock stepped while guards wrote: the position counts, and no line's time.
    #[test]
    fn lines_whose_times_step_are_counted_once_each() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        let reader = scene.reader();
        for (before, time) in ["12:00:00", "13:00:01", "11:00:02", "12:00:00", "12:00:00"]
            .into_iter()
            .enumerate()
        {
            scene.append(&LINE.replace("null", &format!("\"2026-11-23T{time}Z\"")));
            count(&reader, metrics);
            assert_eq!(admissions(metrics), (before + 1).to_string(), "{time}");
        }
        count(&scene.reader(), metrics);
        assert_eq!(admissions(metrics), "5");
    }

    #[test]
    fn half_a_line_waits_for_its_rest() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        let reader = scene.reader();
        scene.append(&LINE[..20]);
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "0");
        scene.append(&LINE[20..]);
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "1");
    }

    #[test]
    fn a_journal_that_comes_later_or_is_emptied_is_read_from_its_beginning() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        fs::remove_file(scene.journal()).unwrap();
        let reader = scene.reader();
        count(&reader, metrics);
        scene.append(LINE);
        scene.append(LINE);
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "2");
        fs::write(scene.journal(), LINE).unwrap();
        count(&reader, metrics);
        assert_eq!(admissions(metrics), "3");
    }

    #[test]
    fn lines_that_cannot_be_read_are_counted_as_such() {
        let (scene, metrics) = (Scene::new(), Metrics::new());
        let reader = scene.reader();
        scene.append("nonsense\n");
        scene.append(&LINE.replace("\"version\":1", "\"version\":99"));
        count(&reader, metrics);
        let text = metrics.text().unwrap();
        for line in ["{reason=\"foreign\"} 1", "{reason=\"newer\"} 1"] {
            assert!(
                text.contains(&format!("bindguard_journal_unread_lines_total{line}")),
                "{text}"
            );
        }
    }
}

#[cfg(test)]
mod follow_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::mpsc::channel;

    use bindguard_testing::own_namespace;
    use bindguard_testing::scene::tmpfs;

    use super::*;

    /// A node may mount the disk of its journal late.
    #[test]
    fn a_journal_on_a_disk_that_is_mounted_later_is_read() {
        if !own_namespace() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("journal.jsonl");
        let (lengths, received) = channel();
        let read = journal.clone();
        thread::spawn(move || {
            follow_journal(&read, Duration::from_millis(50), || {
                let _ = lengths.send(read.metadata().map_or(0, |metadata| metadata.len()));
            })
        });
        // The second call follows the watch.
        assert_eq!([(); 2].map(|()| received.recv().unwrap()), [0; 2]);
        tmpfs(folder.path());
        fs::write(&journal, "a line").unwrap();
        while received.recv_timeout(Duration::from_secs(30)).unwrap() == 0 {}
    }
}
