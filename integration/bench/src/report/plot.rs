//! Two plots: memory over the number of pods, and what a container costs over the number of mounts
//! on its host.

use std::fmt::Display;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::results::Results;

const SIZE: (u32, u32) = (760, 420);

/// The reader's theme decides. A rule of a stylesheet has priority over the attributes that the
/// library writes; the grey line is too dark for a dark page.
const DARK: &str = "<style>@media (prefers-color-scheme: dark) {
[fill=\"#FFFFFF\"] { fill: #0D1117; }
[fill=\"#000000\"] { fill: #E6EDF3; }
[stroke=\"#000000\"] { stroke: #E6EDF3; }
[stroke=\"#6E6E6E\"] { stroke: #8B949E; }
[stroke=\"#0072B2\"] { stroke: #2F9BE0; }
}</style>
";

type Line = Vec<(f64, f64)>;

/// All shims of so many pods together, in MiB.
pub fn memory(results: &Results, file: &Path) -> Result<()> {
    let lines = lines(results, Figure::Pss, |pods, kib| pods * kib / 1024.0);
    let title = "Memory of all shims (PSS, MiB) over the number of pods";
    draw(file, title, 0.0..longest(&lines, |(pods, _)| *pods), &lines)
}

/// CPU time of a container's life.
pub fn create(results: &Results, file: &Path) -> Result<()> {
    let lines = lines(results, Figure::LifeAmongMounts, |_, milliseconds| {
        milliseconds
    });
    let title = "CPU time of a container's life (ms) over the number of mounts on its host";
    let mounts = (100.0..longest(&lines, |(mounts, _)| *mounts)).log_scale();
    draw(file, title, mounts, &lines)
}

fn lines(
    results: &Results,
    figure: Figure,
    value: impl Fn(f64, f64) -> f64,
) -> Vec<(Candidate, Line)> {
    let line = |candidate| -> Line {
        let places = results.places(figure).into_iter();
        places
            .filter_map(|at| {
                Some((
                    at as f64,
                    value(at as f64, results.median(figure, candidate, at)?),
                ))
            })
            .collect()
    };
    let lines = Candidate::ALL
        .into_iter()
        .map(|candidate| (candidate, line(candidate)));
    lines.filter(|(_, line)| !line.is_empty()).collect()
}

fn longest(lines: &[(Candidate, Line)], part: impl Fn(&(f64, f64)) -> f64) -> f64 {
    lines
        .iter()
        .flat_map(|(_, line)| line)
        .map(part)
        .fold(1.0, f64::max)
}

fn draw<X>(file: &Path, title: &str, across: X, lines: &[(Candidate, Line)]) -> Result<()>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    let failed = |error: &dyn Display| anyhow!("draw {}: {error}", file.display());
    let up: Range<f64> = 0.0..longest(lines, |(_, value)| *value) * 1.05;
    let mut drawn = String::new();
    let area = SVGBackend::with_string(&mut drawn, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(28)
        .x_label_area_size(32)
        .y_label_area_size(48)
        .build_cartesian_2d(across, up)
        .map_err(|error| failed(&error))?;
    let whole = |value: &f64| format!("{value:.0}");
    let mut mesh = chart.configure_mesh();
    mesh.x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .max_light_lines(0);
    mesh.draw().map_err(|error| failed(&error))?;
    for (candidate, line) in lines {
        let colour = colour(*candidate);
        let series = LineSeries::new(line.iter().copied(), colour.stroke_width(2)).point_size(3);
        let series = chart.draw_series(series).map_err(|error| failed(&error))?;
        series
            .label(candidate.title())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    let mut legend = chart.configure_series_labels();
    legend
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3));
    legend.draw().map_err(|error| failed(&error))?;
    area.present().map_err(|error| failed(&error))?;
    drop(chart);
    drop(area);
    let head = drawn.find('\n').map_or(0, |end| end + 1);
    drawn.insert_str(head, DARK);
    fs::write(file, drawn).with_context(|| format!("write {}", file.display()))
}

/// After Okabe and Ito, for every kind of eye.
fn colour(candidate: Candidate) -> RGBColor {
    match candidate {
        Candidate::Bindguard => RGBColor(213, 94, 0),
        Candidate::Rust => RGBColor(0, 114, 178),
        Candidate::Go24 => RGBColor(0, 158, 115),
        Candidate::Go17 => RGBColor(86, 180, 233),
        Candidate::Go21 => RGBColor(204, 121, 167),
        Candidate::Runc => RGBColor(110, 110, 110),
        Candidate::Crun | Candidate::EmptyPrograms => RGBColor(190, 190, 190),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// The rules for a dark page are effective only while the library writes colours in this form.
    #[test]
    fn a_dark_page_changes_colours_that_the_plot_has() {
        let file = std::env::temp_dir().join(format!("bindguard-plot-{}.svg", std::process::id()));
        let candidates = [Candidate::Runc, Candidate::Rust];
        let lines = candidates.map(|candidate| (candidate, vec![(0.0, 1.0), (9.0, 2.0)]));
        draw(&file, "title", 0.0..9.0, &lines).unwrap();
        let drawn = fs::read_to_string(&file).unwrap();
        fs::remove_file(&file).unwrap();
        let (head, plot) = drawn.split_once("</style>").unwrap();
        assert!(head.starts_with("<svg ") && head.contains("prefers-color-scheme: dark"));
        for rule in head.lines().filter(|line| line.starts_with('[')) {
            let attribute = rule[1..].split(']').next().unwrap();
            assert!(plot.contains(attribute), "no {attribute} in {plot}");
        }
    }
}
