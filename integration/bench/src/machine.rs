//! On what, and with which programs, the figures were taken.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use bindguard_integration::Generation;
use bindguard_integration::doc_commands::repository;
use bindguard_integration::process::{host, run};
use bindguard_integration::programs::Matrix;
use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;

/// Names and their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine(pub Vec<(String, String)>);

impl Machine {
    /// Reads the properties of this machine.
    pub fn read() -> Result<Self> {
        let matrix = Matrix::locate()?;
        let newest = |program: &str| version(&matrix.program(Generation::NEWEST, program));
        let mut rows = vec![
            ("processor".to_owned(), processor()?),
            ("memory".to_owned(), memory()?),
            ("kernel".to_owned(), format!("Linux {}", kernel()?)),
            ("containerd, client".to_owned(), newest("containerd")?),
            ("runc".to_owned(), newest("runc")?),
            ("crun".to_owned(), newest("crun")?),
        ];
        for shim in Candidate::SHIMS {
            if let Some(program) = shim.program(&matrix) {
                let version = if shim == Candidate::Bindguard {
                    revision()?
                } else {
                    version(&program)?
                };
                rows.push((
                    shim.title().to_owned(),
                    format!("{version}, {}", linked(&program)?),
                ));
            }
        }
        Ok(Self(rows))
    }
}

/// The one minute load of the machine, with all programs: proc_loadavg(5).
pub fn load() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("read the load")?;
    text.split(' ')
        .next()
        .and_then(|load| load.parse().ok())
        .with_context(|| format!("parse the load {text:?}"))
}

/// The number alone, without what a distribution calls its build.
fn kernel() -> Result<String> {
    let release = host(["uname", "-r"])?;
    Ok(release
        .trim()
        .split('-')
        .next()
        .unwrap_or_default()
        .to_owned())
}

fn processor() -> Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo").context("read what processor this is")?;
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("model name"))
        .collect();
    let name = names
        .first()
        .map_or("unknown", |name| name.trim_start_matches([' ', '\t', ':']));
    Ok(format!(
        "{name}, {} of them",
        std::thread::available_parallelism().context("count the processors")?
    ))
}

fn memory() -> Result<String> {
    let text = fs::read_to_string("/proc/meminfo").context("read how much memory there is")?;
    let kib = text
        .split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse::<f64>().ok())
        .context("parse meminfo")?;
    Ok(format!("{:.0} GiB", kib / 1024.0 / 1024.0))
}

/// The first word of what it says that is a number with dots.
fn version(program: &Path) -> Result<String> {
    let flag = if program.to_string_lossy().contains("shim") {
        "-v"
    } else {
        "--version"
    };
    let mut command = Command::new(program);
    command.arg(flag);
    let said = run(command)?.success()?;
    let is_version =
        |word: &&str| word.starts_with(|first: char| first.is_ascii_digit()) && word.contains('.');
    let version = said
        .split_whitespace()
        .map(|word| word.trim_start_matches('v'))
        .find(is_version);
    // a packager's suffix does not matter
    let version = version.and_then(|version| version.split(['~', '+']).next());
    version.map(str::to_owned).with_context(|| {
        format!(
            "find the version in what {} says: {said}",
            program.display()
        )
    })
}

/// The commit that `make bench` builds.
fn revision() -> Result<String> {
    let mut git = Command::new("git");
    git.arg("-C")
        .arg(repository())
        .args(["rev-parse", "--short", "HEAD"]);
    Ok(format!(
        "{}, {}",
        env!("CARGO_PKG_VERSION"),
        run(git)?.success()?.trim()
    ))
}

fn linked(program: &Path) -> Result<&'static str> {
    // ldd fails for a static program, with varying messages
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    let said = run(ldd)?;
    Ok(if said.code() == 0 && said.stdout.contains("=>") {
        "dynamic"
    } else {
        "static"
    })
}
