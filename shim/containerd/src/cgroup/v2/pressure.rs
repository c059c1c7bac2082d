//! Pressure stall information: how long tasks waited for a resource, see the kernel's
//! accounting/psi.

use containerd_shim_protos::cgroups_v2::metrics::{PSIData, PSIStats};

use crate::cgroup::directory::Directory;

/// A `*.pressure` file; none if the kernel does not count (`psi=0`, or `cgroup.pressure` is 0).
pub(super) fn of(directory: &Directory, name: &str) -> Option<PSIStats> {
    parse(&directory.text(name)?)
}

/// Lines `some …` (some tasks waited) and `full …` (all tasks waited). Kernels before 5.13 have no
/// `full` for the processor.
fn parse(text: &str) -> Option<PSIStats> {
    let mut stats = PSIStats::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("some") => stats.some = data(words).into(),
            Some("full") => stats.full = data(words).into(),
            _ => {}
        }
    }
    (stats.some.is_some() || stats.full.is_some()).then_some(stats)
}

/// `avg10=0.12 avg60=0.03 avg300=0.00 total=123456`: percent, and microseconds. A line with an
/// unknown word is skipped.
fn data<'a>(words: impl Iterator<Item = &'a str>) -> Option<PSIData> {
    let mut data = PSIData::new();
    for word in words {
        let (key, value) = word.split_once('=')?;
        match key {
            "avg10" => data.avg10 = percent(value)?,
            "avg60" => data.avg60 = percent(value)?,
            "avg300" => data.avg300 = percent(value)?,
            "total" => data.total = value.parse().ok()?,
            _ => {}
        }
    }
    Some(data)
}

fn percent(value: &str) -> Option<f64> {
    value
        .parse()
        .ok()
        .filter(|percent: &f64| percent.is_finite())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_lines() {
        let text = "some avg10=1.50 avg60=0.25 avg300=0.00 total=42\nfull avg10=0.75 avg60=0.00 avg300=99.99 total=7\n";
        let stats = parse(text).unwrap();
        assert_eq!(
            (stats.some.avg10, stats.some.avg60, stats.some.total),
            (1.5, 0.25, 42)
        );
        assert_eq!(
            (stats.full.avg10, stats.full.avg300, stats.full.total),
            (0.75, 99.99, 7)
        );
    }

    #[test]
    fn an_odd_line_is_no_line() {
        let stats =
            parse("some avg10=nan total=1\nfull avg10=0.00 new=1 total=2\nmost total=3\n").unwrap();
        assert_eq!((stats.some.is_some(), stats.full.total), (false, 2));
        assert!(parse("").is_none() && parse("some total=x\n").is_none());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(some|full|x)?( (avg10|total|x)=?[0-9.naif-]{0,5}){0,4}", any: String) {
            let _ = (parse(&text), parse(&any));
        }
    }
}
