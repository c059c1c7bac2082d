//! `make suites`: critest of cri-tools and containerd's client integration suite, against the stock
//! shim and against bindguard in each of its forms, with `proof = "refuse"`.
//!
//! The images come from a registry of the story's own, `integration/suites/registry.py`. Each story
//! prints a table of docs/parity.md, and fails if a test that the stock shim passes does not pass
//! with bindguard.

use bindguard_integration::prelude::*;
use std::collections::BTreeMap;
use std::env;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::sync::mpsc::channel;

use bindguard_integration::cluster::Network;
use bindguard_integration::doc_commands::repository;
use bindguard_integration::image;
use bindguard_integration::mount_calls::bind;
use bindguard_integration::node::SOCKET;
use bindguard_integration::process::run_with_input;
use bindguard_integration::programs::{Matrix, SHIM, STOCK_SHIM};
use nix::sched::{CloneFlags, unshare};

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
/// The client suite has no wrapper's column: its runtimes have no options.
const CLIENT_COLUMNS: [&str; 3] = ["stock", "bindguard", "under the stock name"];
/// The registries of the client suite's images. The suite pulls by HTTPS.
const CLIENT_REGISTRIES: [&str; 2] = ["ghcr.io", "registry.k8s.io"];
const HTTPS_PORT: u16 = 443;
/// The parent of the client suite's cgroups: the containerd namespace of its containers.
const CLIENT_NAMESPACE: &str = "testing";
/// A guard against a hang, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

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
                    network.give_pods_addresses(node, &suites()?.join("network/bin"))?;
                    let _registry = Registry::start(node)?;
                    for (handler, column) in HANDLERS {
                        let outcomes = outcomes_of_critest(node, handler)?;
                        send.send((generation, column, outcomes))?;
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
    remove_cgroups("k8s.io");
    println!(
        "{}",
        table("critest 1.37", &HANDLERS.map(|(_, column)| column), &all)
    );
    let worse = worse_than_stock(&all);
    assert!(worse.is_empty(), "worse than the stock shim: {worse:#?}");
}

/// One containerd after the other: the suite's cgroups have the same names in each run.
#[test]
#[ignore = "half an hour: make suites"]
fn client_of_containerd() {
    let mut all = Vec::new();
    for generation in GENERATIONS {
        // the node's mounts and the network are the thread's
        let run = thread::spawn(move || {
            let _network = Network::enter().expect("a network namespace");
            let mut of_generation = Vec::new();
            Setup::on(generation)
                .policy("checks.proof = 'refuse'\n")
                .story(|node| {
                    // the suite's containerd has its root there
                    tmpfs("/var/lib", "mode=755")?;
                    let faulty = suites()?.join(module(node)).join("runc-fp");
                    symlink(faulty, node.programs().join("runc-fp")).context("link runc-fp")?;
                    symlink(node.containerd(), node.programs().join("containerd"))
                        .context("link containerd")?;
                    let _registry = Registry::start_https(node)?;
                    for column in CLIENT_COLUMNS {
                        let outcomes = outcomes_of_client(node, column)?;
                        of_generation.push((generation, column, outcomes));
                    }
                    Ok(())
                });
            of_generation
        });
        all.extend(run.join().expect("a run of the client suite"));
    }
    remove_cgroups(CLIENT_NAMESPACE);
    println!("{}", table("client integration", &CLIENT_COLUMNS, &all));
    let worse = worse_than_stock(&all);
    assert!(worse.is_empty(), "worse than the stock shim: {worse:#?}");
}

/// Removes empty cgroups that a suite left.
fn remove_cgroups(parent: &str) {
    for hierarchy in fs::read_dir("/sys/fs/cgroup").expect("the cgroup hierarchies") {
        let _ = fs::remove_dir(hierarchy.unwrap().path().join(parent));
    }
}

/// The folder of the suites' programs and logs.
fn suites() -> Result<PathBuf> {
    let folder = env::var_os("BINDGUARD_SUITES").context("set BINDGUARD_SUITES: make suites")?;
    Ok(folder.into())
}

/// Serves the images in the story's network, until this value is dropped.
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

    /// Starts the registry under the names of the client suite's registries, with a certificate
    /// that [`certificate`] names.
    fn start_https(node: &Node) -> Result<Self> {
        let (certificate, key) = (certificate(node), node.disk().join("registry.key"));
        let names = CLIENT_REGISTRIES
            .map(|name| format!("DNS:{name}"))
            .join(",");
        let mut openssl = node.command("openssl")?;
        openssl.args([
            "req",
            "-x509",
            "-nodes",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ]);
        openssl.args([
            "-subj",
            "/CN=registry",
            "-addext",
            &format!("subjectAltName={names}"),
        ]);
        openssl
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate);
        run(openssl)?.success()?;
        let hosts: String = CLIENT_REGISTRIES
            .iter()
            .map(|name| format!("127.0.0.1 {name}\n"))
            .collect();
        let file = node.disk().join("hosts");
        fs::write(&file, hosts).context("name the registries")?;
        bind(&file, "/etc/hosts")?;

        let mut command = node.command("/usr/bin/python3")?;
        command.arg(repository().join("integration/suites/registry.py"));
        command.arg(image::busybox()?).arg(HTTPS_PORT.to_string());
        command.arg(&certificate).arg(&key).stdin(Stdio::null());
        let registry = Self(command.spawn().context("start the registry")?);
        until("the registry listens", || {
            Ok(TcpStream::connect(("127.0.0.1", HTTPS_PORT)).is_ok())
        })?;
        Ok(registry)
    }
}

fn certificate(node: &Node) -> PathBuf {
    node.disk().join("registry.crt")
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs critest on the node with each handler.
fn outcomes_of_critest(node: &Node, handler: &str) -> Result<Outcomes> {
    let programs = Matrix::locate()?.folder().join("v/cri-tools-1.37/bin");
    let endpoint = format!("unix://{SOCKET}");
    let report = node.disk().join(format!("report-{handler}.xml"));
    let mut critest = node.command(programs.join("critest"))?;
    critest.current_dir(node.disk());
    critest.args(["-runtime-endpoint", &endpoint, "-image-endpoint", &endpoint]);
    critest.args(["-runtime-handler", handler, "-report-dir"]);
    critest.args([
        "-ginkgo.no-color",
        "-ginkgo.timeout=110m",
        "-test.timeout=115m",
    ]);
    critest.arg(format!("-ginkgo.junit-report={}", report.display()));
    let ended = run_with_input(critest, "", LIMIT)?;
    let log = format!("critest-{}-{handler}.log", node.generation()).replace(' ', "-");
    fs::write(suites()?.join(log), &ended.stdout).context("keep the log")?;
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

/// Runs the client suite with the shim of this column. The suite starts and ends a containerd of
/// its own, and the containerd finds the shims on its `PATH`.
fn outcomes_of_client(node: &Node, column: &str) -> Result<Outcomes> {
    let stock_name = node.programs().join(STOCK_SHIM);
    let stock = fs::read_link(&stock_name).context("read the link to the stock shim")?;

    // A pid namespace ends with the suite, and with it the containers, whose cgroups are not the
    // node's. The shell is process 1 and reaps the shims.
    let mut suite = node.command("unshare")?;
    suite.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    suite.args(["sh", "-c", "\"$@\"; exit $?", "sh"]);
    suite.arg(suites()?.join(module(node)).join("client.test"));
    suite
        .current_dir(node.disk())
        .env("SSL_CERT_FILE", certificate(node));
    // criu fails to dump the suite's containers on cgroup v1, with every shim
    suite.args(["-test.root", "-no-criu", "-test.v", "-test.run", "^Test"]);
    // it imports images without a shim, and fails now and then on a busy machine
    suite.args(["-test.skip", "^TestTransferImport$", "-test.timeout=115m"]);
    if column == "bindguard" {
        suite.env("TEST_RUNTIME", "io.containerd.bindguard.v2");
    } else if column == "under the stock name" {
        replace_link(&node.under_test().join(SHIM), &stock_name)?;
    }
    let ended = run_with_input(suite, "", LIMIT)?;
    replace_link(&stock, &stock_name)?;
    let log = format!("client-{}-{column}.log", node.generation()).replace(' ', "-");
    let text = format!("{}{}", ended.stdout, ended.stderr);
    fs::write(suites()?.join(log), text).context("keep the log")?;

    let mut outcomes = Outcomes::new();
    for line in ended.stdout.lines() {
        for (mark, status) in [("PASS", "passed"), ("FAIL", "failed"), ("SKIP", "skipped")] {
            if let Some((_, name)) = line.split_once(&format!("--- {mark}: ")) {
                let name = name.split(' ').next().unwrap_or(name);
                outcomes.insert(name.to_owned(), status.to_owned());
            }
        }
    }
    ensure!(
        outcomes.len() > 100,
        "the client suite ran {} tests: {}",
        outcomes.len(),
        ended.stderr
    );
    Ok(outcomes)
}

/// The node's containerd, as a folder of `integration/matrix/go`.
fn module(node: &Node) -> String {
    node.generation().to_string().replace(' ', "-")
}

fn replace_link(to: &Path, link: &Path) -> Result<()> {
    fs::remove_file(link)
        .and_then(|()| symlink(to, link))
        .with_context(|| format!("link {} to {}", link.display(), to.display()))
}

/// A table of docs/parity.md, and below it the tests that did not pass.
fn table(title: &str, columns: &[&str], all: &[(Generation, &str, Outcomes)]) -> String {
    let mut lines = format!("| {title} | {} |\n|---|", columns.join(" | "));
    lines.push_str(&"---|".repeat(columns.len()));
    for generation in GENERATIONS {
        lines.push_str(&format!("\n| {generation} |"));
        for column in columns {
            let (mut passed, mut ran) = (0, 0);
            for (of, by, outcomes) in all {
                if *of == generation && by == column {
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
    for (generation, column, outcomes) in all {
        for (name, status) in outcomes.iter().filter(|(_, status)| *status != "passed") {
            lines.push_str(&format!("\n{generation}, {column}: {status}: {name}"));
        }
    }
    lines
}

/// The tests that pass with the stock shim, and do not pass with bindguard.
fn worse_than_stock(all: &[(Generation, &str, Outcomes)]) -> Vec<String> {
    let mut worse = Vec::new();
    for (generation, _, stock) in all.iter().filter(|(_, column, _)| *column == "stock") {
        for (_, column, outcomes) in all.iter().filter(|(of, ..)| of == generation) {
            for (name, _) in stock.iter().filter(|(_, status)| *status == "passed") {
                let status = outcomes.get(name).map_or("not run", String::as_str);
                if status != "passed" {
                    worse.push(format!("{generation}, {column}: {status}: {name}"));
                }
            }
        }
    }
    worse
}
