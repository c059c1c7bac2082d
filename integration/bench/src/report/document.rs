//! A document that people write, with places that the bench fills: from `<!-- bench: NAME -->` to
//! the next `<!-- end -->`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

const END: &str = "<!-- end -->";

/// A document on its way to disk.
#[derive(Debug)]
pub struct Document {
    path: PathBuf,
    text: String,
}

impl Document {
    pub fn open(path: PathBuf) -> Result<Self> {
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(Self { path, text })
    }

    /// Puts `content` in the place of what a section holds.
    pub fn fill(&mut self, section: &str, content: &str) -> Result<()> {
        let filled = filled(&self.text, section, content);
        self.text = filled
            .with_context(|| format!("find the section {section} in {}", self.path.display()))?;
        Ok(())
    }

    /// Writes it.
    pub fn save(self) -> Result<()> {
        fs::write(&self.path, self.text).with_context(|| format!("write {}", self.path.display()))
    }
}

fn filled(text: &str, section: &str, content: &str) -> Option<String> {
    let beginning = format!("<!-- bench: {section} -->\n");
    let (before, rest) = text.split_once(&beginning)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!(
        "{before}{beginning}{}\n{END}{after}",
        content.trim_end()
    ))
}

#[cfg(test)]
mod tests {
    use super::filled;

    const TEXT: &str =
        "a\n<!-- bench: one -->\nold\n<!-- end -->\nb\n<!-- bench: two -->\n<!-- end -->\n";

    #[test]
    fn only_the_named_section_changes() {
        let once = filled(TEXT, "one", "new\n").unwrap();
        assert_eq!(once, TEXT.replace("old", "new"));
        assert_eq!(filled(&once, "one", "old").unwrap(), TEXT);
        assert_eq!(filled(TEXT, "three", "new"), None);
    }
}
