//! The examples in the documents.

/// The example in docs/json.md below a heading.
pub fn documented(heading: &str) -> &'static str {
    let document = include_str!("../../../docs/json.md");
    let below = document
        .split_once(&format!("\n## {heading}\n"))
        .map(|(_, below)| below);
    let block = below
        .and_then(|below| below.split_once("```json\n"))
        .and_then(|(_, block)| block.split_once("```"));
    block
        .map(|(block, _)| block)
        .unwrap_or_else(|| panic!("docs/json.md has no JSON below {heading}"))
}
