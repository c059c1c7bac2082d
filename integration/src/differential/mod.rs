//! Old programs beside today's: a change that moves code must change no output.
//!
//! Each build plays the same cases on nodes of its own, and each case is a text: exit code, stdout,
//! stderr, and the files that a program wrote. Both builds run at the same time, each in a pid
//! namespace. A part is a process of its own, so that a program that hangs or kills fails its part.
//!
//! ```text
//!   compare ─┬─ record PART, BINDGUARD_BIN_DIR=OLD ──► cases ─┐
//!            └─ record PART, BINDGUARD_BIN_DIR=NEW ──► cases ─┴─► differences − expected
//! ```
//! Not compared: times, and all that [`volatile`] replaces.

mod inputs;
mod node_life;
mod readers;
mod volatile;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use similar::TextDiff;

use crate::node::{Keeper, Node};
use crate::privilege;
use crate::process::{Finished, run, run_with_input};
use crate::programs::{AGENT, CLI, GUARD, SHIM};
use volatile::Volatile;

/// The first word of the command line of a recording process.
pub const RECORD: &str = "record";

/// Nothing takes as long, unless it hangs.
const PART_TIMEOUT: Duration = Duration::from_secs(1800);

/// The lines printed of a difference.
const MAX_LINES: usize = 40;

/// The folders of both builds.
#[derive(Debug)]
pub struct Builds {
    pub old: PathBuf,
    /// Today's.
    pub new: PathBuf,
}

/// The texts by the name of their case.
type Cases = BTreeMap<String, String>;

/// Records the cases of a node.
struct Recorder<'n> {
    node: &'n Node,
    volatile: Volatile,
    cases: Cases,
}

impl<'n> Recorder<'n> {
    fn on(node: &'n Node) -> Result<Self> {
        let volatile = Volatile::of(node)?;
        let cases = Cases::new();
        Ok(Self {
            node,
            volatile,
            cases,
        })
    }

    /// The command line with these words.
    fn cli(&mut self, area: &str, words: &[&str]) -> Result<()> {
        self.cli_with(
            &format!("{area}: bindguard {}", words.join(" ")),
            words,
            &[],
        )
    }

    /// The same with variables, under this name.
    fn cli_with(&mut self, name: &str, words: &[&str], variables: &[(&str, &str)]) -> Result<()> {
        let mut command = self
            .node
            .command(self.node.under_test().join("bindguard"))?;
        command.args(words).envs(variables.iter().copied());
        volatile::restart_pids()?;
        let ended = run(command)?;
        self.ended(name, &ended)
    }

    fn ended(&mut self, name: &str, ended: &Finished) -> Result<()> {
        let (code, out, err) = (ended.code(), &ended.stdout, &ended.stderr);
        self.add(name, &format!("exit {code}\n{out}--- stderr\n{err}"))
    }

    fn add(&mut self, name: &str, text: &str) -> Result<()> {
        let name = self.volatile.replaced(name);
        let text = self.volatile.replaced(text);
        let former = self.cases.insert(name.clone(), text);
        ensure!(former.is_none(), "two cases have the name {name:?}");
        Ok(())
    }
}

/// Plays all parts with both builds, and prints the differences. True if each is expected, and each
/// expected difference occurs.
pub fn compare(builds: &Builds, expected: &Path, specs: Option<PathBuf>) -> Result<bool> {
    if let Some(why) = privilege::missing() {
        bail!("this needs a root shell on a machine with cgroups: {why}");
    }
    let expected = Expected::read(expected)?;
    // A node is named after its process, and two calls of this program may run at once.
    let pids = volatile::PIDS.start + u64::from(std::process::id() % 100 * 6);
    let (mut total, mut unexpected, mut occurred) = (0, 0, BTreeSet::new());
    for part in readers::PARTS.iter().chain(&node_life::PARTS) {
        let (specs, started) = (specs.as_deref(), Instant::now());
        let (old, new) = thread::scope(|scope| {
            let old = scope.spawn(|| play(part, &builds.old, pids, specs));
            let new = play(part, &builds.new, pids + 3, specs);
            (
                old.join()
                    .map_err(|_| anyhow!("the old build's part panicked")),
                new,
            )
        });
        let (old, new) = (old??, new?);
        println!(
            "{part}: {} cases, {} s",
            new.len(),
            started.elapsed().as_secs()
        );
        let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        total += names.len();
        for name in names {
            let (old, new) = (old.get(name), new.get(name));
            if old == new {
                continue;
            }
            let mut is_expected = false;
            for (pattern, _) in &expected.patterns {
                if matches(pattern, name) {
                    is_expected = true;
                    occurred.insert(pattern);
                }
            }
            if !is_expected {
                unexpected += 1;
                print_difference(name, old, new);
            }
        }
    }
    let mut missing = 0;
    for (pattern, reason) in &expected.patterns {
        if !occurred.contains(pattern) {
            missing += 1;
            println!("EXPECTED, BUT NOTHING DIFFERS: {pattern} because {reason}");
        }
    }
    println!(
        "differential: {total} cases, {unexpected} unexpected differences, {} expected, {missing} expected but missing",
        occurred.len()
    );
    Ok(unexpected == 0 && missing == 0)
}

/// Records a part with the programs of `BINDGUARD_BIN_DIR`, into a file.
pub fn record(part: &str, out: &Path, specs: Option<PathBuf>) -> Result<()> {
    let cases = if readers::PARTS.contains(&part) {
        readers::play(part, specs.as_deref())
    } else {
        node_life::play(part)
    }?;
    let text = serde_json::to_string(&cases).context("serialize the cases")?;
    fs::write(out, text).with_context(|| format!("write {}", out.display()))
}

/// Runs a recording process in a pid namespace, with pids from `first` on.
fn play(part: &str, build: &Path, first: u64, specs: Option<&Path>) -> Result<Cases> {
    let build = fs::canonicalize(build).with_context(|| format!("find {}", build.display()))?;
    // The recorder's own keeper ends with the pid namespace.
    let name = format!("bgt-{}-0", first + 1);
    let disk = Path::new("/var/cache").join(&name);
    let out = disk.with_extension("cases");
    let programs = disk.with_extension("build");
    let _keeper = Keeper::start(&name, &[&disk, &out, &programs])?;
    // The folder of a build may be one that bindguard runs no program of, such as /tmp.
    fs::create_dir(&programs).with_context(|| format!("create {}", programs.display()))?;
    for program in [SHIM, GUARD, CLI, AGENT] {
        let copied = fs::copy(build.join(program), programs.join(program));
        copied.with_context(|| format!("copy {} of {}", program, build.display()))?;
    }
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    // The shell is process 1 and reaps the shims, whose parents end.
    let script = format!("echo {first} > {}; \"$@\"; exit $?", volatile::LAST_PID);
    command.args(["sh", "-c", &script, "sh"]);
    command.arg(std::env::current_exe().context("find the own program")?);
    command.args([RECORD, part]).arg(&out).args(specs);
    command.env("BINDGUARD_BIN_DIR", &programs);
    let ended = run_with_input(command, "", PART_TIMEOUT)?;
    let play = || format!("play {part} with {}", build.display());
    ended.success().with_context(play)?;
    let text = fs::read_to_string(&out).with_context(play)?;
    serde_json::from_str(&text).with_context(play)
}

/// Differences that a change is meant to make.
struct Expected {
    patterns: Vec<(String, String)>,
}

impl Expected {
    /// Lines such as `spec *: check --json because the key has a new name`.
    fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let mut patterns = Vec::new();
        for line in text.lines() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (pattern, reason) = line
                .split_once(" because ")
                .with_context(|| format!("{}: no `because` in {line:?}", file.display()))?;
            patterns.push((pattern.to_owned(), reason.to_owned()));
        }
        Ok(Self { patterns })
    }
}

/// True if a name has the parts between the asterisks of a pattern, in their order.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, more)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let (middle, last) = more.rsplit_once('*').unwrap_or(("", more));
    let inner = name.strip_prefix(first);
    let Some(mut rest) = inner.and_then(|inner| inner.strip_suffix(last)) else {
        return false;
    };
    for part in middle.split('*') {
        let Some((_, after)) = rest.split_once(part) else {
            return false;
        };
        rest = after;
    }
    true
}

fn print_difference(name: &str, old: Option<&String>, new: Option<&String>) {
    println!("DIFFERENCE {name}");
    let (Some(old), Some(new)) = (old, new) else {
        let (side, text) = if old.is_some() {
            ("old", old)
        } else {
            ("new", new)
        };
        println!("  only the {side} build has this case");
        for line in text.into_iter().flat_map(|text| text.lines()).take(3) {
            println!("  {line:.300}");
        }
        return;
    };
    let (old, new) = (in_lines(old), in_lines(new));
    let difference = TextDiff::from_lines(&old, &new);
    let text = difference.unified_diff().context_radius(2).to_string();
    for line in text.lines().take(MAX_LINES) {
        println!("  {line:.300}");
    }
    let more = text.lines().count().saturating_sub(MAX_LINES);
    if more > 0 {
        println!("  ... {more} more lines");
    }
}

/// A long line, as JSON is, has a line for each of its values.
fn in_lines(text: &str) -> String {
    let mut lines = String::new();
    for line in text.lines() {
        match line.len() {
            0..200 => lines.push_str(line),
            _ => lines.push_str(&line.replace(',', ",\n")),
        }
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_cases() {
        for (pattern, name) in [
            ("a", "a"),
            ("a*", "a"),
            ("*c", "abc"),
            ("a*b*c", "axbxc"),
            ("a*b*", "abab"),
            ("*", ""),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("a*a", "a"), ("a*b*c", "acb"), ("*b", "abc")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
