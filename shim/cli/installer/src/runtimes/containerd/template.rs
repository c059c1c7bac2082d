//! The templates from which distributions generate containerd's file at each start.
//!
//! The generated file is never edited. It serves the trial: the edit is tried on its text, then
//! made in the template.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bindguard_core::program_names::RUNTIME;

use super::edit::{Edited, Trial};
use super::handler::as_item;

/// MicroK8s' template.
pub const MICROK8S: &str = "/var/snap/microk8s/current/args/containerd-template.toml";
const BEGIN: &str = "# begin of bindguard's lines: `bindguard uninstall` removes them\n";
const END: &str = "# end of bindguard's lines\n";

/// The template of k3s and RKE2, in Go's template language: the edit appends a block. A new
/// template begins with k3s' own.
pub fn of_k3s(trial: &Trial<'_>) -> Result<Edited> {
    if let Some(default) = &trial.meant.default {
        let first = if default == RUNTIME {
            "run this without --default, then "
        } else {
            ""
        };
        bail!(
            "k3s and RKE2 write the default runtime themselves: {first}put `default-runtime: {default}` into config.yaml of /etc/rancher"
        );
    }
    let table = trial
        .place
        .with_runtime("", RUNTIME, &as_item(&trial.meant.handler))?;
    let block = format!("{BEGIN}{}\n{END}", table.trim());
    let generated = with_block(&trial.main.text, &block);
    let after = trial.main.effective_with(trial.containerd, &generated)?;
    let surprises = trial.before.surprises(&after, trial.meant);
    if !surprises.is_empty() {
        bail!(
            "containerd would read more than was meant ({}): nothing was changed",
            surprises.join(", ")
        );
    }
    let path = k3s_template(&trial.main.path, trial.main.version);
    let present = trial.former.of(&path)?;
    Ok((
        path,
        with_block(
            &present.unwrap_or_else(|| "{{ template \"base\" . }}\n".to_owned()),
            &block,
        ),
    ))
}

/// MicroK8s' template is TOML with variables in its strings: the same edit fits the template and
/// the generated file.
pub fn of_microk8s(trial: &Trial<'_>) -> Result<Edited> {
    trial.main()?.context(
        "containerd does not take its runtimes from MicroK8s' file: nothing was changed",
    )?;
    // `current` leads to the revision of the snap, and after a refresh to the next revision
    let path = PathBuf::from(MICROK8S);
    let text = trial
        .former
        .of(&path)?
        .with_context(|| format!("find {}", path.display()))?;
    let edited = trial
        .with_handler(&text)
        .with_context(|| format!("edit {}", path.display()))?;
    Ok((path, edited))
}

/// The text without bindguard's block; `None` if the text has no such block.
pub fn without_block(text: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!(
        "{}{after}",
        before.strip_suffix('\n').unwrap_or(before)
    ))
}

fn with_block(text: &str, block: &str) -> String {
    let text = without_block(text).unwrap_or_else(|| text.to_owned());
    let end = if text.ends_with('\n') || text.is_empty() {
        ""
    } else {
        "\n"
    };
    format!("{text}{end}\n{block}")
}

/// The templates of k3s and RKE2: of version 3, and the older name.
pub fn k3s_templates(config: &Path) -> [PathBuf; 2] {
    ["config-v3.toml.tmpl", "config.toml.tmpl"].map(|name| config.with_file_name(name))
}

/// k3s uses the template of the file's version, or else the older name.
fn k3s_template(config: &Path, version: i64) -> PathBuf {
    let [of_version, older] = k3s_templates(config);
    match version {
        3 if of_version.symlink_metadata().is_ok() || older.symlink_metadata().is_err() => {
            of_version
        }
        _ => older,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_comes_is_replaced_and_goes() {
        let block = |what: &str| format!("{BEGIN}{what}\n{END}");
        for text in ["{{ template \"base\" . }}\n", "", "a = 1\n# mine\n"] {
            let with = with_block(text, &block("[one]"));
            assert!(
                with.starts_with(text) && with.contains("\n[one]\n"),
                "{with}"
            );
            let again = with_block(&with, &block("[two]"));
            assert!(
                again.contains("\n[two]\n") && !again.contains("[one]"),
                "{again}"
            );
            assert_eq!(without_block(&again).as_deref(), Some(text));
        }
        assert_eq!(without_block("a = 1\n"), None);
    }
}
