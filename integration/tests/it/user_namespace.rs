//! A container in a user namespace: root of the container has no rights on the node, can write the
//! container's files, and the output arrives.
//!
//! The snapshotter copies the image with mapped owners. With a label, containerd 2.1 leaves the
//! image unchanged, and the shim mounts the image with mapped ids.

use bindguard_integration::prelude::*;

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| {
                let ctr = node.ctr();
                let container = ctr.container("mapped").runtime(runtime);
                let container = container.argument("--uidmap").argument("0:100000:65536");
                let container = container.argument("--gidmap").argument("0:100000:65536");
                let container = container.argument("--remap-labels");
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
