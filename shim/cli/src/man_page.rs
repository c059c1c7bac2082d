//! Examples and exit codes, in the help and as sections of the manual. The package of the agent makes
//! its page with this file as well.

use std::io::{self, Write};

use clap::Command;
use clap_mangen::Man;

/// A paragraph for each command, after its name.
const EXAMPLES: &str = include_str!("examples.txt");

/// The end of a command's help. Each of its paragraphs becomes a section of the manual.
pub fn end_of_help(name: &str) -> String {
    let codes = match name {
        "bindguard-install" | "bindguard-uninstall" => "0 done, 1 work remains, 2 failed",
        "bindguard-agent" => "0 ended by a signal, 1 failed",
        _ => "0 no problems, 1 problems found, 2 not everything could be checked",
    };
    let end = format!("Exit status:\n  {codes}");
    let mut examples = EXAMPLES.split("\n\n").filter_map(|it| it.split_once('\n'));
    match examples.find(|(of, _)| *of == name) {
        Some((_, examples)) => format!("Examples:\n{}\n\n{end}", examples.trim_end()),
        None => end,
    }
}

/// The page of a command.
pub fn page(command: Command) -> io::Result<Vec<u8>> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let end = end_of_help(name);
    let mut page = Vec::new();
    let man = Man::new(command.after_help(None::<&str>)).manual("bindguard");
    man.render(&mut page)?;
    finish(page, &end)
}

/// Appends these sections and the references. Lines are not filled.
pub fn finish(mut page: Vec<u8>, sections: &str) -> io::Result<Vec<u8>> {
    for section in sections.split("\n\n") {
        let (heading, text) = section.split_once(":\n").unwrap_or(("", section));
        if !heading.is_empty() {
            writeln!(page, ".SH \"{}\"", heading.to_uppercase())?;
        }
        writeln!(page, ".nf")?;
        for line in text.lines() {
            // A line that begins with a dot or a quote would be a request.
            writeln!(page, "\\&{}", line.replace('\\', "\\e").replace('-', "\\-"))?;
        }
        writeln!(page, ".fi\n.PP")?;
    }
    writeln!(
        page,
        ".SH \"SEE ALSO\"\n.BR bindguard (1),\n.BR bindguard\\-agent (1),\n.BR bindguard.toml (5)"
    )?;
    Ok(page)
}
