//! The tests in docs/parity.md exist: stories in this folder, or unit tests of the shim.

use bindguard_integration::prelude::*;

/// The names of the sources and of the tests in a cell: `a::b` in backticks, and stories without.
fn names(cell: &str) -> (Vec<&str>, Vec<&str>) {
    let parts: Vec<&str> = cell.split('`').collect();
    let units = parts
        .iter()
        .skip(1)
        .step_by(2)
        .copied()
        .filter(|name| name.contains("::"));
    let outside = parts.iter().step_by(2);
    let words = outside.flat_map(|text| {
        text.split(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '_')
    });
    (
        units.collect(),
        words.filter(|word| word.contains('_')).collect(),
    )
}

/// The last cells of all tables whose last column is `test`.
fn cells(page: &str) -> Vec<&str> {
    let (mut cells, mut is_tests, mut before) = (Vec::new(), false, "");
    for line in page.lines() {
        let last = line
            .trim_end()
            .trim_end_matches('|')
            .rsplit('|')
            .next()
            .unwrap_or_default()
            .trim();
        if !before.starts_with('|') {
            is_tests = last == "test";
        } else if is_tests && line.starts_with('|') {
            cells.push(last);
        }
        before = line;
    }
    cells
}

/// `a::b::c`: the longest part that is a source file, and in it the modules and functions of the
/// rest.
fn is_unit_test(sources: &Path, name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    (1..=parts.len()).rev().any(|length| {
        let (module, rest) = parts.split_at(length);
        let module = sources.join(module.join("/"));
        let text = fs::read_to_string(module.with_extension("rs"))
            .or_else(|_| fs::read_to_string(module.join("mod.rs")));
        let has = |text: &String, name: &str| {
            text.contains(&format!("mod {name}")) || text.contains(&format!("fn {name}("))
        };
        text.is_ok_and(|text| rest.iter().all(|name| has(&text, name)))
    })
}

#[test]
fn each_test_on_the_page_exists() -> Result<()> {
    let stories = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the folder of the sources")?;
    let page = fs::read_to_string(root.join("docs/parity.md")).context("read docs/parity.md")?;
    let (mut named, mut missing) = (0, Vec::new());
    for cell in cells(&page) {
        let (units, words) = names(cell);
        named += units.len() + words.len();
        let sources = root.join("shim/containerd/src");
        missing.extend(
            units
                .into_iter()
                .filter(|name| !is_unit_test(&sources, name)),
        );
        missing.extend(
            words
                .into_iter()
                .filter(|name| stories.join(format!("{name}.rs")).metadata().is_err()),
        );
    }
    ensure!(named > 100, "only {named} names were found");
    ensure!(
        missing.is_empty(),
        "docs/parity.md names tests that do not exist: {missing:?}"
    );
    Ok(())
}
