//! The programs read files of other processes that a process can block only where a separate
//! process reads them. Each new place is a conscious choice: `hooks/sys/src/process_files.rs` has
//! the locks.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Readers of these wait for the mmap_lock of the process.
const OF_MEMORY: [&str; 9] = [
    "cmdline",
    "environ",
    "maps",
    "smaps",
    "smaps_rollup",
    "numa_maps",
    "pagemap",
    "map_files",
    "clear_refs",
];

/// The files of the sources with one of these names, and why.
const ALLOWED: [(&str, &str, &str); 1] = [(
    "hooks/sys/src/process_files.rs",
    "cmdline",
    "a separate process reads it, with a time limit",
)];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            if !["tests", "testing", "benches", "target", "fuzz"]
                .iter()
                .any(|other| name == *other)
            {
                sources(&path, found)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// The code before the tests, without comments.
fn code(text: &str) -> String {
    let product = text
        .split("\n#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    let lines = product
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The names of files of memory that are a whole part of a path in a string.
fn names_in(code: &str) -> Vec<&'static str> {
    let strings = code.split('"').skip(1).step_by(2);
    let parts: Vec<&str> = strings.flat_map(|text| text.split('/')).collect();
    OF_MEMORY
        .into_iter()
        .filter(|name| parts.contains(name))
        .collect()
}

#[test]
fn files_of_a_process_are_read_where_they_cannot_block() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the folder of the sources")?;
    let mut files = Vec::new();
    for folder in ["hooks", "shim", "config"] {
        sources(&root.join(folder), &mut files)?;
    }
    ensure!(files.len() > 300, "only {} files were found", files.len());
    let mut unused = ALLOWED.to_vec();
    for file in files {
        let place = file.strip_prefix(root)?.to_string_lossy().into_owned();
        for name in names_in(&code(&fs::read_to_string(&file)?)) {
            let is_this = |(allowed, of, _): &(&str, &str, &str)| *allowed == place && *of == name;
            ensure!(
                ALLOWED.iter().any(is_this),
                "{place} names {name}: a process can block its readers; use bindguard_sys::process_files, or add it here with a reason"
            );
            unused.retain(|allowed| !is_this(allowed));
        }
    }
    ensure!(unused.is_empty(), "not read any more: {unused:?}");
    Ok(())
}

#[test]
fn a_name_is_found_as_a_part_of_a_path_alone() {
    assert_eq!(
        names_in(r#"read(format!("/proc/{pid}/cmdline"))"#),
        ["cmdline"]
    );
    assert_eq!(names_in(r#"process.read("environ")"#), ["environ"]);
    assert!(names_in(r#"let maps = "idmaps"; // "#).is_empty());
}
