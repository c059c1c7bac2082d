//! Under a policy of `refuse`, no container starts unchecked if the guard dies, hangs, panics or is
//! missing: the unchecked spec may have a bind that policy refuses.
//!
//! The same holds for a command line or a spec that the guard does not understand: the runtime may
//! read a bind there. Each runc and crun is tried with and without the guard.
//!
//! A pod whose annotation may set the policy, and sets no `refuse`, starts anyway. So does every
//! pod where policy refuses nothing (guard_dies_or_is_missing, guard_stopped_past_deadline).

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::symlink;

use bindguard_integration::image;
use bindguard_integration::process::{LIMIT, run_with_input};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// The deadline is never reached on a busy machine, except by a guard that hangs.
const POLICY: &str = "[guard]\ndeadline-ms = 20000\n[checks]\ndead-sources = \"refuse\"\n[annotations]\nmode = true\n";

#[test]
fn killed() {
    refused_after(
        "start",
        &[Runtime::Bindguard],
        "the guard did not hand over",
    );
}

#[test]
fn hung() {
    let short = POLICY.replace("20000", "400");
    Setup::on(Generation::NEWEST)
        .fault("stop:start")
        .policy(&short)
        .story(|node| {
            refused(node, Runtime::Bindguard, "no answer within 400ms")?;
            refusal_is_recorded(node, "late")?;
            starts_unguarded_by_its_own_choice(node)
        });
}

/// Also where no shim of ours starts the guard.
#[test]
fn panicked() {
    refused_after(
        "panic:start",
        &[Runtime::Bindguard, Runtime::Wrapper],
        "the guard panicked",
    );
}

#[test]
fn not_installed() {
    Setup::on(Generation::NEWEST).policy(POLICY).story(|node| {
        let guard = node.programs().join(GUARD);
        fs::remove_file(&guard).with_context(|| format!("remove {}", guard.display()))?;
        refused(node, Runtime::Bindguard, "is not installed")?;
        starts_unguarded_by_its_own_choice(node)
    });
}

/// The hook of Podman and CRI-O gets a spec that runtimes read differently.
#[test]
fn hook_without_a_look() {
    Setup::on(Generation::NEWEST).policy(POLICY).story(|node| {
        // Runtimes in Go read this key, others do not.
        let spec = r#"{"Mounts":[]}"#;
        let hook = |policy: Option<&str>| -> Result<Finished> {
            let mut command = node.command(node.under_test().join(CLI))?;
            command.args(["hook", "precreate"]);
            command.envs(policy.map(|file| ("BINDGUARD_CONFIG", file)));
            run_with_input(command, spec, LIMIT)
        };
        let words = hook(None)?.failure()?;
        ensure!(words.contains("policy refuses"), "{words}");
        let passed_on = hook(Some("/nowhere"))?.success()?;
        ensure!(passed_on == spec, "{passed_on}");
        Ok(())
    });
}

fn refused_after(fault: &str, runtimes: &[Runtime], why: &str) {
    Setup::on(Generation::NEWEST)
        .fault(fault)
        .policy(POLICY)
        .story(|node| {
            runtimes
                .iter()
                .try_for_each(|runtime| refused(node, *runtime, why))?;
            refusal_is_recorded(node, "died")?;
            if fault.starts_with("panic") {
                Ok(())
            } else {
                starts_unguarded_by_its_own_choice(node)
            }
        });
}

fn refusal_is_recorded(node: &Node, unchecked: &str) -> Result<()> {
    until("the journal has the refusal", || {
        let ended = node.bindguard(["journal", "--json"])?;
        let journal: Value = serde_json::from_str(&ended.stdout)?;
        let lines = journal["admissions"].as_array().into_iter().flatten();
        Ok(lines.into_iter().any(|line| {
            line["id"] == "unseen"
                && line["unchecked"] == unchecked
                && line["refused"]
                    .to_string()
                    .contains("policy refuses what may be there")
        }))
    })
}

fn refused(node: &Node, runtime: Runtime, why: &str) -> Result<()> {
    let words = node
        .ctr()
        .container("unseen")
        .runtime(runtime)
        .start()?
        .failure()?;
    for said in [why, "policy refuses what may be there"] {
        ensure!(
            words.contains(said),
            "the error does not say {said:?}: {words}"
        );
    }
    node.ctr().forget("unseen")?;
    let tasks = node.ctr().tasks()?;
    ensure!(
        !tasks.contains("unseen"),
        "a refused container is still there: {tasks}"
    );
    Ok(())
}

fn starts_unguarded_by_its_own_choice(node: &Node) -> Result<()> {
    node.ctr()
        .container("willing")
        .annotation("bindguard.io/mode", "off")
        .start()?
        .success()?;
    node.ctr().remove("willing")
}

/// Command lines that some runtime takes for a create of the bundle `B`. The working directory is a
/// bundle without the bind that policy refuses.
const COMMAND_LINES: [&str; 26] = [
    "create --bundle B c1",
    "-- create --bundle B c1",
    "--debug -- create --bundle B -- c1",
    "create c1 --bundle B",
    "create --bun B c1",
    "create --b B c1",
    "create -b B c1",
    "create -bB c1",
    "create -b./B c1",
    "create -b=B c1",
    "create -bundle B c1",
    "create -bundle=B c1",
    "create -bcc c1",
    "create --no-piv -b B c1",
    "create --no-new-keyring -b B c1",
    "create --no-pivot=false -b B c1",
    "create --preserve-fds 0 -b B c1",
    "create --bundle cc --bundle B c1",
    "--deb create -b B c1",
    "-debug create -b B c1",
    "--log-f json create -b B c1",
    "--log-f=text create -b B c1",
    "run -d -b B c1",
    "run -db B c1",
    "run -dbB c1",
    "run --det --bun=B c1",
];

/// The form of a config.json.
enum Config {
    File(String),
    Fifo(String),
    Stdin(String),
}

const PLAIN: &str = r#"{REST,"mounts":[PROC,BIND]}"#;

/// Specs with a bind of `SOURCE` that some runtime reads.
fn specs() -> Vec<Config> {
    let mut texts = Vec::new();
    for key in ["Mounts", "MOUNTS", "mountſ", "mounts\\u0000x"] {
        texts.push(format!(r#"{{REST,"{key}":[PROC,BIND]}}"#));
    }
    for mounts in [
        r#""mounts":[PROC,BIND],"mounts":[{},{}]"#,
        r#""mounts":[PROC,BIND],"mounts":[PROC]"#,
        r#""mounts":[PROC],"mounts":[PROC,BIND]"#,
        r#""mounts":[PROC],"Mounts":[PROC,BIND]"#,
    ] {
        texts.push(format!("{{REST,{mounts}}}"));
    }
    for bind in [
        r#""Source":SOURCE,"options":["bind"]"#,
        r#""ſource":SOURCE,"options":["bind"]"#,
        r#""source\u0000":SOURCE,"options":["bind"]"#,
        r#""sourc\u0065":SOURCE,"options":["bind"]"#,
        r#""source":"/etc","source":SOURCE,"options":["bind"]"#,
        r#""source":SOURCE,"source":"/etc","options":["bind"]"#,
        r#""source":SOURCE,"Source":null,"options":["bind"]"#,
        r#""source":SOURCE,"options":["bind"],"options":[null]"#,
        r#""source":SOURCE,"options":[],"Options":["bind"]"#,
        r#""source":SOURCE,"options":["bind\u0000"]"#,
    ] {
        let bind = format!(r#"{{"destination":"/data","type":"none",{bind}}}"#);
        texts.push(format!(r#"{{REST,"mounts":[PROC,{bind}]}}"#));
    }
    texts.push(format!("{PLAIN} and more"));
    texts.push(format!("/* a comment */{PLAIN}"));
    texts.push(format!("{PLAIN}{PLAIN}"));
    let mut specs: Vec<Config> = texts.into_iter().map(Config::File).collect();
    specs.push(Config::Fifo(PLAIN.to_owned()));
    specs.push(Config::Stdin(PLAIN.to_owned()));
    specs
}

macro_rules! on_runtimes {
    ($($name:ident: $generation:expr, $oci:expr;)+) => {
        mod no_create_is_unseen {
            use super::*;

            $(#[test]
            fn $name() {
                Setup::on($generation).oci($oci).story(no_create_is_unseen);
            })+
        }
    };
}

on_runtimes! {
    runc_1_3: Generation::NEWEST, Oci::Runc(Generation::V2_1);
    runc_1_4: Generation::NEWEST, Oci::Runc(Generation::V2_3);
    runc_1_5: Generation::NEWEST, Oci::Runc(Generation::NEWEST);
    crun_1_21: Generation::V1_7, Oci::Crun(Generation::V1_7);
    crun: Generation::NEWEST, Oci::Crun(Generation::NEWEST);
}

fn no_create_is_unseen(node: &Node) -> Result<()> {
    let scene = Hidden::lay_out(node)?;
    let plain = || Config::File(PLAIN.to_owned());
    let mut cases: Vec<(&str, Config)> = COMMAND_LINES.iter().map(|it| (*it, plain())).collect();
    cases.extend(specs().into_iter().map(|spec| (COMMAND_LINES[0], spec)));
    cases.push(("create -f B/config.json c1", plain()));
    let (mut wrong, mut created) = (Vec::new(), 0);
    for (words, config) in &cases {
        let creates = |program, policy| scene.creates(program, policy, words, config);
        let stock = creates("runc", "report")?;
        let (reported, refused) = (creates(GUARD, "report")?, creates(GUARD, "refuse")?);
        created += usize::from(stock);
        if reported != stock || refused {
            let text = match config {
                Config::File(text) => text,
                Config::Fifo(_) => "a fifo",
                Config::Stdin(_) => "stdin",
            };
            wrong.push(format!(
                "{words} of {text}: created by stock {stock}, reported {reported}, refused {refused}"
            ));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(created > 20, "the runtime itself created only {created}");
    let journal = fs::read_to_string(scene.folder.join("refuse.jsonl"))?;
    let refused = journal.matches("\"refused\":\"").count();
    ensure!(refused >= created, "{refused} refusals of {created}");
    Ok(())
}

/// A bundle `B` with a bind that policy refuses, in a bundle without such a bind.
struct Hidden<'n> {
    node: &'n Node,
    folder: PathBuf,
    source: PathBuf,
}

impl<'n> Hidden<'n> {
    fn lay_out(node: &'n Node) -> Result<Self> {
        let folder = node.disk().join("containerd/hidden");
        let volume = "pods/uid-1/volumes/kubernetes.io~nfs/data";
        let source = node.kubelet().root().join(volume);
        fs::create_dir_all(&source).context("make a volume that is not mounted")?;
        image::lay_out(&folder.join("B/rootfs"))?;
        symlink("B/rootfs", folder.join("rootfs"))?;
        for name in ["cc", "=B", "undle=B"] {
            symlink("B", folder.join(name)).with_context(|| format!("make the link {name}"))?;
        }
        for policy in ["report", "refuse"] {
            let text = format!(
                "[kubelet]\nroots = [{:?}]\n[checks]\nunmounted-volumes = {policy:?}\n[journal]\npath = {:?}\n",
                node.kubelet().root(),
                folder.join(format!("{policy}.jsonl"))
            );
            fs::write(folder.join(format!("{policy}.toml")), text).context("write a policy")?;
        }
        let scene = Self {
            node,
            folder,
            source,
        };
        fs::write(
            scene.folder.join("config.json"),
            scene.filled(r#"{REST,"mounts":[PROC]}"#),
        )?;
        Ok(scene)
    }

    fn filled(&self, text: &str) -> String {
        let rest = json!({
            "ociVersion": "1.0.2",
            "process": {"args": ["sleep", "60"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs"},
            "linux": {
                "cgroupsPath": self.node.cgroups_path("hidden"),
                "namespaces": [{"type": "pid"}, {"type": "mount"}],
            },
        });
        let rest = rest.to_string();
        let bind = r#"{"destination":"/data","type":"bind","source":SOURCE,"options":["rbind"]}"#;
        let proc = r#"{"destination":"/proc","type":"proc","source":"proc"},
            {"destination":"/dev","type":"tmpfs","source":"tmpfs"}"#;
        text.replace("REST", &rest[1..rest.len() - 1])
            .replace("PROC", proc)
            .replace("BIND", bind)
            .replace("SOURCE", &format!("{:?}", self.source))
    }

    /// True if there is a container after the call, which ends with it.
    fn creates(&self, program: &str, policy: &str, words: &str, config: &Config) -> Result<bool> {
        let place = self.folder.join("B/config.json");
        let _ = fs::remove_file(&place);
        // Without a mount at /dev, runc leaves links there on which the next create fails.
        let _ = fs::remove_dir_all(self.folder.join("B/rootfs/dev"));
        let mut writer = None;
        let mut input = String::new();
        match config {
            Config::File(text) => fs::write(&place, self.filled(text))?,
            Config::Fifo(text) => {
                fs::write(self.folder.join("text"), self.filled(text))?;
                mkfifo(&place, Mode::from_bits_truncate(0o600)).context("make a fifo")?;
                let mut cat = Command::new("sh");
                cat.args(["-c", "exec cat text > B/config.json"]);
                writer = Some(cat.current_dir(&self.folder).spawn()?);
            }
            Config::Stdin(text) => {
                symlink("/dev/stdin", &place)?;
                input = self.filled(text);
            }
        }
        // crun reads a fifo twice.
        let mut command = self.call(&["timeout", "10"], program)?;
        command.args(words.split(' ')).stdin(Stdio::piped());
        command.env(
            "BINDGUARD_CONFIG",
            self.folder.join(format!("{policy}.toml")),
        );
        if policy == "report" {
            // A later attempt may end without a container, which only a shim of bindguard's knows.
            command.env("BINDGUARD_ATTEMPT", "1");
        }
        let mut child = command.spawn().with_context(|| format!("run {program}"))?;
        let mut stdin = child.stdin.take().context("the child's stdin")?;
        // A program that ended reads nothing.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        child.wait()?;
        if let Some(mut writer) = writer {
            let _ = writer.kill();
            writer.wait()?;
        }
        let exists = self
            .call(&[], "runc")?
            .args(["state", "c1"])
            .status()?
            .success();
        let mut delete = self.call(&[], "runc")?;
        ensure!(
            delete.args(["delete", "--force", "c1"]).status()?.success() || !exists,
            "delete the container"
        );
        Ok(exists)
    }

    fn call(&self, before: &[&str], program: &str) -> Result<Command> {
        let folder = match program {
            GUARD => self.node.under_test(),
            _ => &self.node.programs(),
        };
        let program = folder.join(program);
        let mut command = match before {
            [first, more @ ..] => {
                let mut command = self.node.command(first)?;
                command.args(more).arg(&program);
                command
            }
            [] => self.node.command(&program)?,
        };
        let log = File::create(self.folder.join("log")).context("create a log")?;
        command.arg("--root").arg(self.folder.join("state"));
        command.current_dir(&self.folder).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(log);
        Ok(command)
    }
}
