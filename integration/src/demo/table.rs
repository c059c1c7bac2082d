//! The observations, step by step, beside the expectations.

/// A step of the demo and its observation.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The step, in an operator's words.
    pub step: &'static str,
    /// The runtime it was done with.
    pub runtime: &'static str,
    pub seen: String,
    /// True if it is as the demo expected.
    pub is_as_said: bool,
}

/// All observations of a run.
#[derive(Clone, Debug, Default)]
pub struct Table(Vec<Observation>);

impl Table {
    /// Adds an observation.
    pub fn add(&mut self, observation: Observation) {
        self.0.push(observation);
    }

    /// True if every step went as expected.
    pub fn is_as_said(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|row| row.is_as_said)
    }

    /// Prints the table, with each column as wide as its widest cell.
    pub fn print(&self) {
        println!("\nWhat was observed");
        let rows = self.0.iter().map(|row| {
            [
                row.step,
                row.runtime,
                &row.seen,
                if row.is_as_said { "yes" } else { "NO" },
            ]
        });
        let rows: Vec<_> = [["step", "runtime", "seen", "as expected"]]
            .into_iter()
            .chain(rows)
            .collect();
        let width = |column: usize| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; 4] = std::array::from_fn(width);
        for (number, row) in rows.iter().enumerate() {
            let cells = row
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            println!("  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
            if number == 0 {
                println!("  {}", widths.map(|width| "-".repeat(width)).join("  "));
            }
        }
    }
}
