//! The measured samples: for each figure and candidate, and each number of containers, pods or
//! mounts, some samples.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::machine::Machine;

/// All samples, with the machine and the conditions.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// The machine and the programs.
    pub machine: Machine,
    /// When each part was measured.
    pub conditions: Vec<Condition>,
    series: Vec<Series>,
}

/// A remark on a part's figures.
#[derive(Debug, Serialize, Deserialize)]
pub struct Condition {
    pub part: String,
    pub day: String,
    /// The machine's load before the part; the bench adds 1.
    pub load: f64,
}

/// The samples of a figure for a candidate at a place.
#[derive(Debug, Serialize, Deserialize)]
struct Series {
    figure: Figure,
    candidate: Candidate,
    at: u64,
    samples: Vec<f64>,
}

impl Results {
    /// Empty results of a part.
    pub fn of(machine: Machine, condition: Condition) -> Self {
        Self {
            machine,
            conditions: vec![condition],
            series: Vec::new(),
        }
    }

    /// Adds a sample. `at` is the number of what [`Figure::over`] says, else 0.
    pub fn add(&mut self, figure: Figure, candidate: Candidate, at: u64, sample: f64) {
        let found = self
            .series
            .iter_mut()
            .find(|one| (one.figure, one.candidate, one.at) == (figure, candidate, at));
        match found {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series {
                figure,
                candidate,
                at,
                samples: vec![sample],
            }),
        }
    }

    /// The median, if it was measured.
    pub fn median(&self, figure: Figure, candidate: Candidate, at: u64) -> Option<f64> {
        let series = self
            .series
            .iter()
            .find(|one| (one.figure, one.candidate, one.at) == (figure, candidate, at))?;
        let mut samples = series.samples.clone();
        samples.sort_by(f64::total_cmp);
        samples.get(samples.len() / 2).copied()
    }

    pub fn figures(&self) -> BTreeSet<Figure> {
        self.series.iter().map(|series| series.figure).collect()
    }

    /// At which numbers a figure was measured.
    pub fn places(&self, figure: Figure) -> BTreeSet<u64> {
        self.series
            .iter()
            .filter(|one| one.figure == figure)
            .map(|one| one.at)
            .collect()
    }

    /// Replaces old figures by new figures.
    pub fn replace(&mut self, newer: Self) {
        let measured = newer.figures();
        self.series
            .retain(|series| !measured.contains(&series.figure));
        self.series.extend(newer.series);
        self.conditions
            .retain(|old| newer.conditions.iter().all(|new| new.part != old.part));
        self.conditions.extend(newer.conditions);
        self.machine = newer.machine;
    }

    /// The results in a file; empty if the file does not exist.
    pub fn load(file: &Path) -> Result<Self> {
        match fs::read(file) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| {
                format!(
                    "parse {}: of another edition of the bench? Remove it",
                    file.display()
                )
            }),
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
