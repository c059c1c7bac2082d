//! Issue 16: `bindguard status` on a screen, before and after an installation, with pods from
//! before the installation; and the node's state read from a pod through `--root`.

use bindguard_integration::prelude::*;

fn story(generation: Generation) {
    Setup::on(generation).cri().bare().story(|node| {
        let old = node.cri()?.run_pod("", "old", "old")?;
        let bare = status(node, &[], 1)?;
        ensure!(
            bare["daemons"]
                == json!([{ "daemon": "containerd", "runtimes": [], "default": false }]),
            "{bare}"
        );

        node.bindguard(["install", "--default"])?.success()?;
        let owed = status(node, &[], 1)?;
        ensure!(
            owed["restart_owed"] == json!(["systemctl restart containerd"]),
            "{owed}"
        );
        ensure!(
            owed["daemons"][0]["default"] == false,
            "the running containerd has not read its file: {owed}"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        let cri = node.cri()?;
        // a container that restarts stays with the shim of its pod
        cri.start_container(&old, "app", &["sleep", "1000000"], &[])?;
        let new = cri.run_pod("", "new", "new")?;
        cri.start_container(&new, "app", &["sleep", "1000000"], &[])?;
        let guarded = status(node, &[], 0)?;
        let daemon =
            json!([{ "daemon": "containerd", "runtimes": ["bindguard"], "default": true }]);
        ensure!(
            guarded["daemons"] == daemon && guarded["restart_owed"] == json!([]),
            "{guarded}"
        );
        ensure!(
            guarded["pods"]
                == json!({
                    "running": 2,
                    "unguarded": 1,
                    "versions": [{
                        "version": env!("CARGO_PKG_VERSION"),
                        "pods": [{ "uid": "new", "namespace": "default", "name": "new" }],
                    }],
                }),
            "{guarded}"
        );
        let admitted = guarded["last_admissions"].as_array().context("a list")?;
        ensure!(
            !admitted.is_empty() && admitted.iter().all(|it| it.to_string().contains("new")),
            "{guarded}"
        );
        let doctor = node.bindguard(["doctor", "--json"])?;
        ensure!(
            doctor
                .stdout
                .contains("1 of 2 running pods keep another shim"),
            "{doctor:?}"
        );

        // a pod sees the node's root in a folder
        let root = node.disk().join("node");
        fs::create_dir(&root)?;
        host(["mount", "--rbind", "/", &root.display().to_string()])?;
        let root = root.display().to_string();
        ensure!(
            status(node, &["--root", &root], 0)? == guarded,
            "another answer through --root"
        );
        let there = node.bindguard(["journal", "--json", "--root", &root])?;
        let here = node.bindguard(["journal", "--json"])?;
        ensure!(there.stdout == here.stdout, "{there:?}");
        cri.remove_pod(&old)?;
        cri.remove_pod(&new)
    });
}

on_newest_and_older!(story);

fn status(node: &Node, words: &[&str], code: i32) -> Result<Value> {
    let done = node.bindguard([&["status", "--json"], words].concat())?;
    ensure!(done.code() == code, "{done:?}");
    let text = node.bindguard([&["status"], words].concat())?;
    ensure!(
        text.code() == code && text.stdout.starts_with("version    "),
        "{text:?}"
    );
    serde_json::from_str(&done.stdout).with_context(|| format!("read {}", done.stdout))
}
