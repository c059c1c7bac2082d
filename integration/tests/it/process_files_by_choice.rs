//! A process can block some reads of its `/proc` files. Only a separate process reads such files.
//! Each new place is a conscious choice: `hooks/sys/src/process_files.rs` has the locks.

use bindguard_integration::prelude::*;

/// Readers of these wait for the mmap_lock or the exec_update_lock of the process.
const LOCKED: [&str; 21] = [
    "cmdline",
    "environ",
    "maps",
    "smaps",
    "smaps_rollup",
    "numa_maps",
    "pagemap",
    "map_files",
    "clear_refs",
    "stat",
    "exe",
    "cwd",
    "fd",
    "fdinfo",
    "ns",
    "wchan",
    "stack",
    "io",
    "auxv",
    "syscall",
    "personality",
];

/// The source files that contain such a name, and the reasons.
const ALLOWED: [(&str, &str, &str); 34] = [
    (
        "hooks/operator/src/agent_status.rs",
        "stack",
        "a command that is printed, about a child of the agent",
    ),
    (
        "hooks/operator/src/namespaces.rs",
        "ns",
        "a separate process reads it; the own process and process 1 directly",
    ),
    (
        "hooks/operator/src/namespaces.rs",
        "fd",
        "the list takes no lock; a separate process reads the links",
    ),
    (
        "hooks/operator/src/containers.rs",
        "stat",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "exe",
        "a separate process reads the links",
    ),
    (
        "hooks/operator/src/node.rs",
        "stat",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "ns",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "cwd",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "fdinfo",
        "the list takes no lock; a separate process reads the files",
    ),
    (
        "hooks/operator/src/node.rs",
        "ns",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "ns",
        "a separate process reads it",
    ),
    (
        "hooks/operator/src/node.rs",
        "fd",
        "the list takes no lock; a separate process reads the links",
    ),
    (
        "hooks/sys/src/enter/namespace.rs",
        "ns",
        "the name in an error",
    ),
    (
        "hooks/sys/src/kernel.rs",
        "ns",
        "the name for the child that opens it",
    ),
    (
        "hooks/sys/src/enter/process.rs",
        "exe",
        "a separate process reads it",
    ),
    (
        "hooks/sys/src/enter/process.rs",
        "stat",
        "a separate process reads it",
    ),
    (
        "hooks/sys/src/enter/process.rs",
        "exe",
        "a separate process reads it",
    ),
    (
        "hooks/sys/src/enter/process.rs",
        "stat",
        "a separate process reads it",
    ),
    ("hooks/sys/src/handle.rs", "stat", "the act in an error"),
    (
        "hooks/sys/src/process_files.rs",
        "cmdline",
        "a separate process reads it, with a time limit",
    ),
    (
        "shim/agent/src/work/survey.rs",
        "stat",
        "a separate process reads it",
    ),
    (
        "shim/agent/src/host.rs",
        "ns",
        "of the runtime that serves the socket of the CRI",
    ),
    (
        "shim/cli/installer/src/running/containers.rs",
        "exe",
        "a separate process reads it",
    ),
    (
        "shim/cli/installer/src/session.rs",
        "ns",
        "of the node's first process",
    ),
    (
        "shim/cli/installer/src/running/mod.rs",
        "stat",
        "a separate process reads it; of process 1 only its presence",
    ),
    (
        "shim/cli/installer/src/running/mod.rs",
        "environ",
        "a separate process reads it",
    ),
    (
        "shim/cli/installer/src/running/mod.rs",
        "exe",
        "a separate process reads it",
    ),
    (
        "shim/cli/installer/src/running/mod.rs",
        "ns",
        "a separate process reads it",
    ),
    (
        "shim/containerd/src/cgroup/mod.rs",
        "fd",
        "a thread that can be left behind reads it",
    ),
    (
        "shim/containerd/src/serve.rs",
        "stat",
        "a thread that can be left behind reads it",
    ),
    (
        "shim/containerd/src/serve.rs",
        "wchan",
        "a thread that can be left behind reads it",
    ),
    (
        "shim/containerd/src/rootfs/mod.rs",
        "ns",
        "of a child of the shim, which executes nothing",
    ),
    ("shim/cli/src/selftest.rs", "cwd", "a key of a spec"),
    (
        "shim/cli/src/selftest.rs",
        "fd",
        "of a container that the self-test has just created, within its time limit",
    ),
];

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
    let is_module = |(at, start): &(usize, &str)| {
        let name = text[at + start.len()..].lines().next();
        name.is_some_and(|name| name.ends_with(" {"))
    };
    let tests = text.match_indices("\n#[cfg(test)]\nmod ").find(is_module);
    let product = tests.map_or(text, |(at, _)| &text[..at]);
    let lines = product
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The names of locked files that are a whole part of a path in a string.
fn names_in(code: &str) -> Vec<&'static str> {
    let strings = code.split('"').skip(1).step_by(2);
    // The own process does not block its own readers.
    let of_others = strings.filter(|text| {
        !["/proc/self/", "/proc/thread-self/"]
            .iter()
            .any(|own| text.contains(own))
    });
    let parts: Vec<&str> = of_others.flat_map(|text| text.split('/')).collect();
    LOCKED
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
    ensure!(files.len() > 100, "only {} files were found", files.len());
    let (mut unused, mut wrong) = (ALLOWED.to_vec(), Vec::new());
    for file in files {
        let place = file.strip_prefix(root)?.to_string_lossy().into_owned();
        for name in names_in(&code(&fs::read_to_string(&file)?)) {
            let is_this = |(allowed, of, _): &(&str, &str, &str)| *allowed == place && *of == name;
            if !ALLOWED.iter().any(is_this) {
                wrong.push(format!("{place} names {name}"));
            }
            unused.retain(|allowed| !is_this(allowed));
        }
    }
    ensure!(
        wrong.is_empty(),
        "a process can block its readers; use bindguard_sys::process_files, or add it here with a reason: {wrong:?}"
    );
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
    assert_eq!(names_in(r#"open("/proc/7/ns/mnt")"#), ["ns"]);
    assert!(names_in(r#"open("/proc/self/fd/3")"#).is_empty());
    assert!(names_in(r#"let maps = "idmaps"; // "#).is_empty());
}
