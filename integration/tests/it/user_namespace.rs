//! A container in a user namespace: its root has no rights on the node, its files are its own, its
//! output arrives.
//!
//! The snapshotter copies the image with other owners, or, as containerd 2.1 does when a label
//! requests it, leaves it as it is and has the shim mount it with other ids.

use anyhow::ensure;
use bindguard_integration::{Generation, Runtime, Setup, on_newest_and_older};

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| {
                let ctr = node.ctr();
                let container = ctr.container("mapped").runtime(runtime);
                let container = container.argument("--uidmap").argument("0:100000:65536");
                let container = container.argument("--gidmap").argument("0:100000:65536");
                let container = match generation {
                    Generation::V1_6 => container,
                    Generation::V1_7 | Generation::V2_1 => container.argument("--remap-labels"),
                };
                let script = "cat /proc/self/uid_map; stat -c %u:%g /bin; echo out > /dev/stdout";
                let words = container
                    .runs(&["sh", "-c", script])
                    .run_to_end()?
                    .success()?;
                let words: Vec<&str> = words.split_whitespace().collect();
                ensure!(
                    words == ["0", "100000", "65536", "0:0", "out"],
                    "{runtime:?}: {words:?}"
                );
                Ok(())
            })
    });
}

on_newest_and_older!(story);
