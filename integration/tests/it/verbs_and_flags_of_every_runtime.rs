//! `bindguard-runtime` must know which words of a command line are verbs and which are values. Each
//! runc and crun of the matrix prints its verbs and flags, and the story tests every verb and flag.
//! A mistake shows in the journal: a verb that creates nothing admits the working directory, or a
//! create admits nothing.

use bindguard_integration::prelude::*;
use bindguard_integration::programs::{Matrix, binaries_under_test};

const CREATING: [&str; 3] = ["create", "run", "restore"];

/// A flag of a usage text.
struct Flag {
    word: String,
    has_value: bool,
}

#[test]
fn story() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: bindguard-runtime admits for root only");
        return Ok(());
    }
    let matrix = Matrix::locate()?;
    let scene = Scene::create()?;
    for generation in Generation::ALL {
        for oci in [Oci::Runc(generation), Oci::Crun(generation)] {
            runtime(&scene, &matrix.oci(oci)).with_context(|| format!("{oci}"))?;
        }
    }
    Ok(())
}

fn runtime(scene: &Scene, program: &Path) -> Result<()> {
    let usage = usage(program, &["--help"])?;
    let verbs = verbs(&usage);
    ensure!(
        verbs.len() > 10 && verbs.iter().any(|verb| verb == "update"),
        "{verbs:?} of {usage}"
    );
    for verb in &verbs {
        let creates = CREATING.contains(&verb.as_str());
        let admitted = scene.admitted(&[verb, "--no-such-flag", "create"])?;
        let expected = creates.then(|| ("create".to_owned(), true));
        ensure!(admitted == expected, "{verb}: admitted {admitted:?}");
    }
    for flag in flags(&usage) {
        let words: &[&str] = if flag.has_value {
            &[&flag.word, "start", "create", "c1"]
        } else {
            &[&flag.word, "create", "c1"]
        };
        let admitted = scene.admitted(words)?;
        ensure!(
            admitted == Some(("c1".to_owned(), false)),
            "{words:?}: admitted {admitted:?}"
        );
    }
    for verb in verbs
        .iter()
        .filter(|verb| CREATING.contains(&verb.as_str()))
    {
        let flags = flags(&self::usage(program, &[verb, "--help"])?);
        ensure!(flags.len() > 5, "{verb} has only {} flags", flags.len());
        for flag in flags {
            // The flag for a spec outside the bundle: there is nothing to admit.
            let is_unseen = ["--config", "-f"].contains(&flag.word.as_str());
            let words: &[&str] = if flag.has_value {
                &[verb, &flag.word, ".", "c1"]
            } else {
                &[verb, &flag.word, "c1"]
            };
            let admitted = scene.admitted(words)?;
            ensure!(
                admitted == Some(("c1".to_owned(), is_unseen)),
                "{words:?}: admitted {admitted:?}"
            );
        }
    }
    Ok(())
}

fn usage(program: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(words);
    let answer = run(command)?;
    Ok(answer.stdout + &answer.stderr)
}

/// The lines after `COMMANDS:`: `create  create a container`, `help, h  ...`, or `create - create a
/// container`.
fn verbs(usage: &str) -> Vec<String> {
    let lines = usage
        .lines()
        .skip_while(|line| *line != "COMMANDS:")
        .skip(1)
        .take_while(|line| !line.trim().is_empty());
    lines
        .flat_map(|line| {
            before_text(line)
                .split(", ")
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect()
}

/// `--bundle value, -b value  path` of runc, `-b, --bundle=DIR  container` of crun.
fn flags(usage: &str) -> Vec<Flag> {
    let of_line = |line: &str| {
        let names = before_text(line).to_owned();
        let has_value = names.contains('=') || names.contains(" value");
        let word = |name: &str| name.split(['=', ' ']).next().unwrap_or_default().to_owned();
        names
            .split(", ")
            .map(|name| Flag {
                word: word(name),
                has_value,
            })
            .collect::<Vec<_>>()
    };
    let is_query = |flag: &Flag| {
        ["--help", "-h", "-?", "--usage", "--version", "-v", "-V"].contains(&flag.word.as_str())
    };
    let lines = usage
        .lines()
        .filter(|line| line.starts_with(' ') && line.trim_start().starts_with('-'));
    lines
        .flat_map(of_line)
        .filter(|flag| !is_query(flag))
        .collect()
}

fn before_text(line: &str) -> &str {
    let line = line.trim();
    let end = line
        .find("  ")
        .or_else(|| line.find(" - "))
        .unwrap_or(line.len());
    line[..end].trim()
}

/// A bundle as working directory, and a runtime that does nothing.
struct Scene {
    folder: PathBuf,
    guard: PathBuf,
}

impl Scene {
    fn create() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("bindguard-verbs-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let scene = Self {
            folder,
            guard: binaries_under_test()?.join(GUARD),
        };
        fs::write(
            scene.folder.join("config.json"),
            r#"{"ociVersion":"1.0.2","mounts":[]}"#,
        )?;
        let config = format!(
            "[runtime]\npath = \"/bin/true\"\n[journal]\npath = {:?}\n",
            scene.journal()
        );
        fs::write(scene.folder.join("config.toml"), config)?;
        Ok(scene)
    }

    fn journal(&self) -> PathBuf {
        self.folder.join("journal.jsonl")
    }

    /// The id of the container for which the guard admitted the bundle, and if the guard reported a
    /// problem.
    fn admitted(&self, words: &[&str]) -> Result<Option<(String, bool)>> {
        let _ = fs::remove_file(self.journal());
        let mut command = Command::new(&self.guard);
        command
            .args(words)
            .current_dir(&self.folder)
            .env("BINDGUARD_CONFIG", self.folder.join("config.toml"));
        run(command)?
            .success()
            .with_context(|| format!("{words:?}"))?;
        let Ok(line) = fs::read_to_string(self.journal()) else {
            return Ok(None);
        };
        let line: Value = serde_json::from_str(&line).with_context(|| format!("parse {line:?}"))?;
        let id = line["id"].as_str().unwrap_or_default().to_owned();
        Ok(Some((id, !line["problems"].is_null())))
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
