//! The guard's work within the process: the criterion bench of `hooks/guard`, whose medians are
//! read from its files.

use std::env;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bindguard_integration::doc_commands::repository;
use serde_json::Value;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

const MOUNTS: [u64; 4] = [100, 1_000, 10_000, 30_000];
const BENCHES: [(&str, Figure); 3] = [
    ("30 binds, nothing stale", Figure::WorkClean),
    ("30 binds, 5 stale repaired", Figure::WorkRepaired),
    (
        "mountinfo read and parsed, for comparison",
        Figure::MountinfoRead,
    ),
];

pub fn measure(results: &mut Results) -> Result<()> {
    let home = repository().join("target/criterion");
    if home.exists() {
        fs::remove_dir_all(&home).with_context(|| format!("remove {}", home.display()))?;
    }
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "bench",
            "--quiet",
            "--locked",
            "--package",
            "bindguard-guard",
            "--bench",
            "admit",
            "--",
        ])
        .args([
            "--noplot",
            "--quiet",
            "--warm-up-time",
            "1",
            "--measurement-time",
            "3",
        ])
        .env("CRITERION_HOME", &home)
        .current_dir(repository())
        .status();
    ensure!(
        status.context("run cargo bench")?.success(),
        "cargo bench of bindguard-guard failed"
    );
    for mounts in MOUNTS {
        for (bench, figure) in BENCHES {
            let file = home
                .join(format!("{mounts} mounts"))
                .join(bench)
                .join("new/estimates.json");
            let text = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            let estimates: Value =
                serde_json::from_slice(&text).context("parse criterion's estimates")?;
            let nanoseconds = estimates["median"]["point_estimate"]
                .as_f64()
                .context("find criterion's median")?;
            results.add(figure, Candidate::Bindguard, mounts, nanoseconds / 1e3);
        }
    }
    Ok(())
}
