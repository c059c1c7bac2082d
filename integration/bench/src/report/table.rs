//! A table of Markdown whose columns also line up on a terminal.

use std::fmt;

/// A heading and rows, the first column being their name.
#[derive(Debug)]
pub struct Table(Vec<Vec<String>>);

impl Table {
    /// Without rows.
    pub fn new(first: &str, others: impl IntoIterator<Item = String>) -> Self {
        Self(vec![[first.to_owned()].into_iter().chain(others).collect()])
    }

    /// Adds a row.
    pub fn row(&mut self, first: String, others: impl IntoIterator<Item = String>) {
        self.0.push([first].into_iter().chain(others).collect());
    }

    fn width(&self, column: usize) -> usize {
        self.0
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, row) in self.0.iter().enumerate() {
            for (column, cell) in row.iter().enumerate() {
                let width = self.width(column);
                if column == 0 {
                    write!(f, "| {cell:<width$} ")?
                } else {
                    write!(f, "| {cell:>width$} ")?
                }
            }
            writeln!(f, "|")?;
            if number == 0 {
                for column in 0..row.len() {
                    let dashes = "-".repeat(self.width(column) + 1);
                    if column == 0 {
                        write!(f, "|-{dashes}")?
                    } else {
                        write!(f, "|{dashes}:")?
                    }
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}
