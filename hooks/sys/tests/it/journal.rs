//! The journal under many guards at once, under rotation, and on a disk that is full: whole lines,
//! and none missing.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use bindguard_sys::journal::append;
use bindguard_testing::namespace;
use nix::mount::{MsFlags, mount};

/// In the environment of a copy of this program that is to write: the journal, and the writer's
/// number.
const WRITER: &str = "JOURNAL_WRITER";
const WRITERS: usize = 8;
/// The size at which the journal is rotated, as documented.
const FULL: u64 = 4 << 20;

/// `{"writer":W,"line":N,"filler":"xxx…"}`
fn line(writer: usize, number: usize, filler: usize) -> String {
    format!(
        r#"{{"writer":{writer},"line":{number},"filler":"{}"}}"#,
        "x".repeat(filler)
    )
}

/// The writer and number of a whole line.
fn writer_and_number(line: &str) -> (usize, usize) {
    let rest = line
        .strip_prefix(r#"{"writer":"#)
        .unwrap_or_else(|| panic!("not a line: {line:.80}"));
    let (writer, rest) = rest.split_once(r#","line":"#).unwrap();
    let (number, rest) = rest.split_once(r#","filler":""#).unwrap();
    let filler = rest
        .strip_suffix(r#""}"#)
        .unwrap_or_else(|| panic!("cut off: {line:.80}"));
    assert!(
        filler.bytes().all(|byte| byte == b'x'),
        "two lines in one: {line:.80}"
    );
    (writer.parse().unwrap(), number.parse().unwrap())
}

/// Starts the writers as processes. Each writer appends `lines` lines at the same time.
fn written_at_once(journal: &Path, lines: usize, filler: usize) {
    let writers = (0..WRITERS).map(|writer| {
        let task = format!("{writer} {lines} {filler} {}", journal.display());
        let mut copy = Command::new(env::current_exe().unwrap());
        copy.args(["--exact", "journal::a_writer_of_the_others", "--ignored"])
            .env(WRITER, task)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    });
    for mut writer in writers.collect::<Vec<_>>() {
        assert!(writer.wait().unwrap().success());
    }
}

#[test]
#[ignore = "what the other tests start as processes of their own"]
fn a_writer_of_the_others() {
    let Ok(task) = env::var(WRITER) else { return };
    let words: Vec<&str> = task.splitn(4, ' ').collect();
    let [writer, lines, filler] = [0, 1, 2].map(|at| words[at].parse().unwrap());
    (0..lines)
        .for_each(|number| append(Path::new(words[3]), &line(writer, number, filler)).unwrap());
}

#[test]
fn many_writers_lose_no_line() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    written_at_once(&journal, 300, 900);
    let text = fs::read_to_string(&journal).unwrap();
    let all: BTreeSet<_> = text.lines().map(writer_and_number).collect();
    assert_eq!(
        (text.lines().count(), all.len()),
        (WRITERS * 300, WRITERS * 300)
    );
}

#[test]
fn rotation_under_load_loses_only_the_oldest_lines() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    // 19 MiB in all: four rotations
    written_at_once(&journal, 1200, 2000);
    let files = [folder.path().join("journal.jsonl.1"), journal];
    let texts = files
        .each_ref()
        .map(|file| fs::read_to_string(file).unwrap());
    assert!(
        texts[0].len() as u64 >= FULL,
        "a file that was not full was moved over a full one"
    );
    // Writers continue while the writer that moves a full file away waits for a processor.
    assert!(
        texts.iter().all(|text| text.len() as u64 <= 3 * FULL),
        "{:?}",
        texts.each_ref().map(String::len)
    );
    let kept: Vec<_> = texts
        .iter()
        .flat_map(|text| text.lines())
        .map(writer_and_number)
        .collect();
    for writer in 0..WRITERS {
        let numbers: Vec<_> = kept
            .iter()
            .filter(|(w, _)| *w == writer)
            .map(|(_, number)| *number)
            .collect();
        // The older file may contain late lines: a writer may have opened the file before the
        // rotation.
        let numbers: BTreeSet<_> = numbers.into_iter().collect();
        // All lines of a writer that ended early may be gone.
        let Some((first, last)) = numbers.first().zip(numbers.last()) else {
            continue;
        };
        // A writer loses a line if the writer waits for a processor with an older file open while a
        // journal fills up. A lost file would take hundreds of lines.
        let lost = last - first + 1 - numbers.len();
        assert!(
            lost <= 2,
            "writer {writer} lost {lost} lines between {first} and {last}"
        );
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_line_cut_off_by_a_full_disk_is_removed() {
    if !namespace::enter(false) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    mount(
        Some("tmpfs"),
        folder.path(),
        Some("tmpfs"),
        MsFlags::empty(),
        Some("size=192k"),
    )
    .unwrap();
    let journal: PathBuf = folder.path().join("journal.jsonl");
    append(&journal, &line(0, 0, 5000)).unwrap();
    // the room is enough for a part of it
    let error = append(&journal, &line(0, 1, 400_000)).unwrap_err();
    assert_eq!(error.source.kind(), std::io::ErrorKind::StorageFull);
    // the last 128 KiB are the runtime's
    let mut written = 1;
    let error = loop {
        match append(&journal, &line(0, written, 5000)) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert!((5..16).contains(&written), "{written}");
    assert_eq!(error.source.kind(), std::io::ErrorKind::StorageFull);
    append(&journal, &line(0, written, 5000)).unwrap_err();
    mount(
        None::<&str>,
        folder.path(),
        None::<&str>,
        MsFlags::MS_REMOUNT,
        Some("size=1m"),
    )
    .unwrap();
    append(&journal, &line(0, written, 5000)).unwrap();
    let text = fs::read_to_string(&journal).unwrap();
    assert_eq!(
        text.lines().map(writer_and_number).collect::<Vec<_>>(),
        (0..=written).map(|n| (0, n)).collect::<Vec<_>>()
    );
}

/// A copy of this program appends a line with `limit` as the limit on the size of files. Returns
/// its exit status.
fn append_limited(journal: &Path, limit: u64) -> std::process::ExitStatus {
    let task = format!("0 1 900 {}", journal.display());
    let mut copy = Command::new("prlimit");
    copy.arg(format!("--fsize={limit}"))
        .arg(env::current_exe().unwrap());
    copy.args(["--exact", "journal::a_writer_that_is_refused", "--ignored"])
        .env(WRITER, task);
    copy.stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
}

#[test]
#[ignore = "what the other tests start as a process of its own"]
fn a_writer_that_is_refused() {
    let Ok(task) = env::var(WRITER) else { return };
    let journal = task.splitn(4, ' ').nth(3).unwrap();
    // Threads of an agent write at the same time.
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                for _ in 0..200 {
                    let error = append(Path::new(journal), &line(0, 1, 900)).unwrap_err();
                    let number = error.source.raw_os_error();
                    assert_eq!(number, Some(nix::libc::EFBIG), "{error:?}");
                }
            });
        }
    });
    // What is started later can be ended by the signal.
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    for set in ["SigBlk", "SigIgn"] {
        let line = status.lines().find(|line| line.starts_with(set)).unwrap();
        let bits = line.rsplit('\t').next().unwrap();
        let bits = u64::from_str_radix(bits, 16).unwrap();
        assert_eq!(bits >> (nix::libc::SIGXFSZ - 1) & 1, 0, "{line}");
    }
}

/// Issue 14, item 18: SIGXFSZ ended the guard. A guard that is under the limit only in part leaves
/// no part of a line.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_death() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    append(&journal, &line(0, 0, 900)).unwrap();
    let length = fs::metadata(&journal).unwrap().len();
    for limit in [length / 2, length, length + 100] {
        let ended = append_limited(&journal, limit);
        assert!(ended.success(), "under a limit of {limit} bytes: {ended}");
    }
    let text = fs::read_to_string(&journal).unwrap();
    assert_eq!(
        text.lines().map(writer_and_number).collect::<Vec<_>>(),
        [(0, 0)]
    );
}

/// Issue 14, item 18: opening a fifo without a reader waits for ever.
#[test]
fn only_a_regular_file_is_a_journal() {
    let folder = tempfile::tempdir().unwrap();
    let [fifo, read] = ["fifo", "read"].map(|name| folder.path().join(name));
    for path in [&fifo, &read] {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    }
    let mut reader = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&read)
        .unwrap();
    let refused = |journal: PathBuf| {
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::spawn(move || drop(sender.send(append(&journal, "{}"))));
        // The thread stays where this fails: the test ends with its program.
        let appended = receiver
            .recv_timeout(std::time::Duration::from_secs(60))
            .expect("it waits for a reader");
        assert_eq!(
            appended.unwrap_err().source.kind(),
            std::io::ErrorKind::InvalidInput
        );
    };
    [
        fifo,
        read,
        "/dev/null".into(),
        "/dev/full".into(),
        folder.path().to_owned(),
    ]
    .into_iter()
    .for_each(refused);
    reader.write_all(b"nothing else").unwrap();
    let mut text = [0; 12];
    reader.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"nothing else");
}
