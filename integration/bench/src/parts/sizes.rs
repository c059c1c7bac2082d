//! The size of each shim's program, as it is shipped and after strip(1).

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use bindguard_integration::process::run;
use bindguard_integration::programs::Matrix;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

pub fn measure(results: &mut Results) -> Result<()> {
    let matrix = Matrix::locate()?;
    let stripped = std::env::temp_dir().join(format!("bindguard-bench-{}", std::process::id()));
    for shim in Candidate::SHIMS {
        let Some(program) = shim.program(&matrix) else {
            continue;
        };
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(&stripped).arg(&program);
        let size = run(strip)?.success().and_then(|_| megabytes(&stripped));
        let _ = fs::remove_file(&stripped);
        results.add(Figure::ShippedSize, shim, 0, megabytes(&program)?);
        results.add(Figure::StrippedSize, shim, 0, size?);
    }
    Ok(())
}

fn megabytes(file: &Path) -> Result<f64> {
    Ok(fs::metadata(file)
        .with_context(|| format!("look at {}", file.display()))?
        .len() as f64
        / 1e6)
}
