//! `make suites`: critest of cri-tools against the stock shim and against bindguard in each of its
//! forms, with `proof = "refuse"`.
//!
//! The images come from a registry of the story's own, `integration/suites/registry.py`. The story
//! prints docs/parity.md's table, and fails if bindguard fails or skips a test that the stock shim
//! passes.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_integration::cluster::Network;
use bindguard_integration::doc_commands::repository;
use bindguard_integration::node::SOCKET;
use bindguard_integration::process::run_with_input;
use bindguard_integration::programs::Matrix;
use bindguard_integration::{Generation, Node, Setup, image};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;

const GENERATIONS: [Generation; 2] = [Generation::V2_3, Generation::V2_4];
/// The handlers of a node, and the columns of the table.
const HANDLERS: [(&str, &str); 4] = [
    ("runc", "stock"),
    ("bindguard", "bindguard"),
    ("bindguard-path", "under the stock name"),
    ("bindguard-wrapper", "wrapper"),
];
const REGISTRY_PORT: u16 = 5000;
const REGISTRIES: [&str; 3] = ["gcr.io", "registry.k8s.io", "k8s.gcr.io"];
const LIMIT: Duration = Duration::from_secs(3000);

/// The outcomes of a run, by the test's name: `passed`, `failed` or `skipped`.
type Outcomes = BTreeMap<String, String>;

#[test]
#[ignore = "half an hour: make suites"]
fn critest() {
    let (send, receive) = channel();
    let threads = GENERATIONS.map(|generation| {
        let send = send.clone();
        thread::spawn(move || {
            let network = Network::enter().expect("a network namespace");
            // critest makes shared memory, and does not remove it
            unshare(CloneFlags::CLONE_NEWIPC).expect("a namespace for shared memory");
            Setup::on(generation)
                .cri()
                .policy("checks.proof = 'refuse'\n")
                .story(|node| {
                    network.give_pods_addresses(node, &plugins()?)?;
                    let _registry = Registry::start(node)?;
                    for (handler, _) in HANDLERS {
                        let outcomes = outcomes_of(node, handler)?;
                        send.send((generation, handler, outcomes))?;
                    }
                    Ok(())
                });
        })
    });
    drop(send);
    let all: Vec<(Generation, &str, Outcomes)> = receive.iter().collect();
    for thread in threads {
        thread.join().expect("a run of critest");
    }
    // critest's pods name no parent, so their cgroups do not lie in a node's
    for hierarchy in fs::read_dir("/sys/fs/cgroup").expect("the cgroup hierarchies") {
        let _ = fs::remove_dir(hierarchy.unwrap().path().join("k8s.io"));
    }
    let lines = table(&all);
    println!("{lines}");
    let worse = worse_than_stock(&all);
    assert!(worse.is_empty(), "worse than the stock shim: {worse:#?}");
}

/// The CNI plugins of `cluster/network.sh`.
fn plugins() -> Result<PathBuf> {
    let folder = env::var_os("BINDGUARD_SUITES").context("set BINDGUARD_SUITES: make suites")?;
    Ok(Path::new(&folder).join("network/bin"))
}

/// Serves the images in the story's network, and ends with this value.
struct Registry(Child);

impl Registry {
    /// Starts the registry, and makes containerd pull from it whatever an image's name is.
    fn start(node: &Node) -> Result<Self> {
        let script = repository().join("integration/suites/registry.py");
        let mut command = node.command("/usr/bin/python3")?;
        command.arg(script).arg(image::busybox()?);
        command.arg(REGISTRY_PORT.to_string()).stdin(Stdio::null());
        let registry = Self(command.spawn().context("start the registry")?);
        let folder = node.disk().join("certs.d");
        let server = format!("http://127.0.0.1:{REGISTRY_PORT}");
        let host = format!(
            "server = {server:?}\n[host.{server:?}]\ncapabilities = [\"pull\", \"resolve\"]\n"
        );
        for name in REGISTRIES {
            let folder = folder.join(name);
            fs::create_dir_all(&folder).context("make a folder for a registry")?;
            fs::write(folder.join("hosts.toml"), &host).context("name the registry")?;
        }
        let mut config = fs::read_to_string(node.containerd_config())?;
        config.push_str(&format!(
            "[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = {folder:?}\n"
        ));
        fs::write(node.containerd_config(), config).context("write containerd's file")?;
        node.restart_containerd(Signal::SIGTERM)?;
        Ok(registry)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs critest on the node with each handler.
fn outcomes_of(node: &Node, handler: &str) -> Result<Outcomes> {
    let programs = Matrix::locate()?.folder().join("v/cri-tools-1.37/bin");
    let endpoint = format!("unix://{SOCKET}");
    let report = node.disk().join(format!("report-{handler}.xml"));
    let mut critest = node.command(programs.join("critest"))?;
    critest.current_dir(node.disk());
    critest.args(["-runtime-endpoint", &endpoint, "-image-endpoint", &endpoint]);
    critest.args(["-runtime-handler", handler, "-report-dir"]);
    critest.args([
        "-ginkgo.no-color",
        "-ginkgo.timeout=50m",
        "-test.timeout=55m",
    ]);
    critest.arg(format!("-ginkgo.junit-report={}", report.display()));
    let ended = run_with_input(critest, "", LIMIT)?;
    if let Some(folder) = env::var_os("BINDGUARD_SUITES") {
        let log = format!("critest-{}-{handler}.log", node.generation()).replace(' ', "-");
        fs::write(Path::new(&folder).join(log), &ended.stdout).context("keep the log")?;
    }
    let mut remove = node.command(programs.join("crictl"))?;
    remove.args(["--runtime-endpoint", &endpoint, "rmp", "--all", "--force"]);
    run_with_input(remove, "", LIMIT)?.success()?;

    let mut outcomes = Outcomes::new();
    let text = fs::read_to_string(&report).with_context(|| format!("critest: {}", ended.stderr))?;
    for case in text.split("<testcase ").skip(1) {
        let value = |key: &str| {
            let start = case.split_once(&format!("{key}=\""))?.1;
            Some(start.split_once('"')?.0.to_owned())
        };
        let (name, status) = value("name")
            .zip(value("status"))
            .context("a test's outcome")?;
        if name.starts_with("[It]") && !name.contains("benchmark") {
            outcomes.insert(name, status);
        }
    }
    ensure!(
        outcomes.len() > 100,
        "critest ran {} tests: {}",
        outcomes.len(),
        ended.stdout
    );
    Ok(outcomes)
}

/// The table of docs/parity.md, and below it the tests that did not pass with the stock shim.
fn table(all: &[(Generation, &str, Outcomes)]) -> String {
    let columns: Vec<&str> = HANDLERS.iter().map(|(_, column)| *column).collect();
    let mut lines = format!("| critest 1.37 | {} |\n|---|", columns.join(" | "));
    lines.push_str(&"---|".repeat(HANDLERS.len()));
    for generation in GENERATIONS {
        lines.push_str(&format!("\n| {generation} |"));
        for (handler, _) in HANDLERS {
            let (mut passed, mut ran) = (0, 0);
            for (of, by, outcomes) in all {
                if (*of, *by) == (generation, handler) {
                    passed = outcomes
                        .values()
                        .filter(|status| *status == "passed")
                        .count();
                    ran = outcomes
                        .values()
                        .filter(|status| *status != "skipped")
                        .count();
                }
            }
            lines.push_str(&format!(" {passed} / {ran} |"));
        }
    }
    for (generation, handler, outcomes) in all {
        for (name, status) in outcomes.iter().filter(|(_, status)| *status != "passed") {
            lines.push_str(&format!("\n{generation}, {handler}: {status}: {name}"));
        }
    }
    lines
}

/// The tests that pass with the stock shim, and do not pass with bindguard.
fn worse_than_stock(all: &[(Generation, &str, Outcomes)]) -> Vec<String> {
    let mut worse = Vec::new();
    for (generation, _, stock) in all
        .iter()
        .filter(|(_, handler, _)| *handler == HANDLERS[0].0)
    {
        for (_, handler, outcomes) in all.iter().filter(|(of, ..)| of == generation) {
            for (name, status) in outcomes {
                if stock.get(name).is_some_and(|of_stock| of_stock == "passed")
                    && status != "passed"
                {
                    worse.push(format!("{generation}, {handler}: {status}: {name}"));
                }
            }
        }
    }
    worse
}
