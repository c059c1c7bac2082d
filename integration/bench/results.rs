//! What was measured: for each figure and candidate, and each number of containers, pods or mounts, some samples.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;
use crate::figure::Figure;

/// All samples.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results(Vec<Series>);

/// The samples of one figure of one candidate at one place.
#[derive(Debug, Serialize, Deserialize)]
struct Series {
    figure: Figure,
    candidate: Candidate,
    at: u64,
    samples: Vec<f64>,
}

impl Results {
    /// Adds a sample. `at` is the number of what [`Figure::columns`] says, else 0.
    pub fn add(&mut self, figure: Figure, candidate: Candidate, at: u64, sample: f64) {
        let found = self.0.iter_mut().find(|one| (one.figure, one.candidate, one.at) == (figure, candidate, at));
        match found {
            Some(series) => series.samples.push(sample),
            None => self.0.push(Series { figure, candidate, at, samples: vec![sample] }),
        }
    }

    /// The median, if it was measured.
    pub fn median(&self, figure: Figure, candidate: Candidate, at: u64) -> Option<f64> {
        let series = self.0.iter().find(|one| (one.figure, one.candidate, one.at) == (figure, candidate, at))?;
        let mut samples = series.samples.clone();
        samples.sort_by(f64::total_cmp);
        samples.get(samples.len() / 2).copied()
    }

    /// The figures there are, in the order of their measurement.
    pub fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        for series in &self.0 {
            if !figures.contains(&series.figure) {
                figures.push(series.figure);
            }
        }
        figures
    }

    /// At which numbers a figure was measured.
    pub fn places(&self, figure: Figure) -> Vec<u64> {
        let mut places: Vec<u64> = self.0.iter().filter(|one| one.figure == figure).map(|one| one.at).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Takes new figures in the place of old ones.
    pub fn replace(&mut self, newer: Self) {
        let measured = newer.figures();
        self.0.retain(|series| !measured.contains(&series.figure));
        self.0.extend(newer.0);
    }

    /// What a file keeps; nothing when there is none.
    pub fn load(file: &Path) -> Result<Self> {
        match fs::read(file) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("understand {}: of another edition of the bench? Remove it", file.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
        }
    }

    /// Keeps them in a file.
    pub fn save(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).context("write the results as JSON")?;
        fs::write(file, text + "\n").with_context(|| format!("write {}", file.display()))
    }
}
