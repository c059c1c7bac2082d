//! `make image-check`: docker builds the image from these sources, for amd64 and arm64, with a
//! compiler from Debian's packages and without a network. The image has the four programs, static
//! and of the right architecture, and nothing else.

use bindguard_integration::prelude::*;
use std::collections::BTreeSet;

use bindguard_integration::doc_commands::repository;
use bindguard_integration::engines::{self, Docker, Storage};
use bindguard_integration::image::busybox;
use bindguard_integration::programs::{AGENT, SHIM};

const COMPILER: &str = "bindguard.test/compiler:1";

/// `e_machine` of elf(5): EM_X86_64 and EM_AARCH64.
const ARCHITECTURES: [(&str, u16); 2] = [("amd64", 62), ("arm64", 183)];

#[test]
#[ignore = "builds the programs twice, half an hour: make image-check"]
fn for_both_architectures() {
    Setup::on(Generation::NEWEST).story(|node| {
        let docker = Docker::start_with(node, Storage::Overlay)?;
        let root = repository().join("target/arm64/root");
        run(
            node,
            "tar",
            &[
                "-C",
                path(&root),
                "--one-file-system",
                "-cf",
                path(&node.disk().join("root.tar")),
                ".",
            ],
        )?;
        run(
            node,
            "docker",
            &["import", path(&node.disk().join("root.tar")), COMPILER],
        )?;
        fs::remove_file(node.disk().join("root.tar"))?;
        ARCHITECTURES
            .iter()
            .try_for_each(|(name, machine)| is_built(node, name, *machine))?;
        // the machine's own architecture
        let own = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        };
        let said = docker
            .run_image(&image(own), &[], &["bindguard-agent", "--version"])?
            .success()?;
        ensure!(said.starts_with("bindguard-agent "), "{said}");
        Ok(())
    });
}

fn is_built(node: &Node, architecture: &str, machine: u16) -> Result<()> {
    let top = repository();
    let words = ["-C", path(&top), "image"].map(str::to_owned);
    let values = [
        format!("BUILD_IMAGE={COMPILER}"),
        format!("PLATFORM=linux/{architecture}"),
        format!("IMAGE={}", image(architecture)),
        format!("DOCKER={}", engines::program("docker").display()),
    ];
    let words: Vec<&str> = words.iter().chain(&values).map(String::as_str).collect();
    run(node, "make", &words)?;
    let (folder, archive) = (
        node.disk().join(architecture),
        node.disk().join("image.tar"),
    );
    fs::create_dir(&folder)?;
    let container = format!("look-{architecture}");
    run(
        node,
        "docker",
        &[
            "create",
            "--name",
            &container,
            "--platform",
            &format!("linux/{architecture}"),
            &image(architecture),
        ],
    )?;
    run(
        node,
        "docker",
        &["export", "--output", path(&archive), &container],
    )?;
    run(
        node,
        "tar",
        &["-C", path(&folder), "-xf", path(&archive), "usr"],
    )?;
    let programs = folder.join("usr/local/bin");
    ensure!(
        names(&programs)? == [SHIM, GUARD, CLI, AGENT].map(str::to_owned).into(),
        "{:?}",
        names(&programs)?
    );
    ensure!(
        names(&folder.join("usr"))?.len() == 1 && names(&folder.join("usr/local"))?.len() == 1,
        "more than programs"
    );
    for name in names(&programs)? {
        let bytes = fs::read(programs.join(&name))?;
        ensure!(
            bytes.get(18..20) == Some(&machine.to_le_bytes()[..]),
            "{name} is of another architecture"
        );
        ensure!(!has_interpreter(&bytes), "{name} needs a loader");
    }
    Ok(())
}

/// True if a program header of elf(5) is PT_INTERP. Both architectures are little-endian with 64
/// bits.
fn has_interpreter(program: &[u8]) -> bool {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, size: usize| {
        let bytes = program.get(at..at + size).unwrap_or_default();
        bytes
            .iter()
            .rev()
            .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let (headers, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|index| number((headers + index * size) as usize, 4) == PT_INTERP)
}

fn image(architecture: &str) -> String {
    format!("bindguard.test/bindguard-node:{architecture}")
}

#[test]
fn a_loader_is_noticed() -> Result<()> {
    ensure!(
        has_interpreter(&fs::read("/bin/sh")?),
        "the loader of the shell is not noticed"
    );
    ensure!(
        !has_interpreter(&fs::read(busybox()?)?),
        "the static busybox has a loader"
    );
    Ok(())
}

fn names(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Runs a program to its end, however long it takes, with its output on the test's.
fn run(node: &Node, program: &str, words: &[&str]) -> Result<()> {
    let program = if program == "docker" {
        engines::program("docker")
    } else {
        PathBuf::from(program)
    };
    let mut command: Command = node.command(&program)?;
    // the tester's own cargo and its settings
    command
        .args(words)
        .env("DOCKER_HOST", Docker::HOST)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default());
    let status = command
        .status()
        .with_context(|| format!("start {}", program.display()))?;
    ensure!(
        status.success(),
        "{} {words:?}: {status}",
        program.display()
    );
    Ok(())
}
