//! Part 2: a configMap changes while its container is created (kubernetes#127602).

use anyhow::Result;

use super::table::{Observation, Table};
use super::{name, quote};
use crate::ctr::Runtime;
use crate::node::Node;
use crate::scenes::{create_with_an_update_in_between, says_no_such_file};

const STEP: &str = "configMap changes during a create";

pub(super) fn show(node: &Node, table: &mut Table) -> Result<()> {
    println!(
        "\n2. The configMap changes while the container is created: after the kubelet's bind, before the runtime's mount.\n   \
         Every kubelet has this race. A pod with `restartPolicy: Never` is lost; the others start at a later try."
    );
    for runtime in [Runtime::Stock, Runtime::Bindguard] {
        println!("\n   {} creates it:", name(runtime));
        let created = create_with_an_update_in_between(node, runtime)?;
        let (seen, is_as_said) = if created.status.success() {
            let content = node.ctr().read("racer", "/etc/app.conf")?;
            node.ctr().remove("racer")?;
            println!("   it runs, and reads `{content}`, the new content");
            let is_current = content == "two" && runtime == Runtime::Bindguard;
            (format!("starts, reads `{content}`"), is_current)
        } else {
            quote(&created.stderr);
            node.ctr().forget("racer")?;
            let is_the_race = says_no_such_file(&created.stderr) && runtime == Runtime::Stock;
            ("fails: no such file or directory".to_owned(), is_the_race)
        };
        table.add(Observation {
            step: STEP,
            runtime: name(runtime),
            seen,
            is_as_said,
        });
    }
    Ok(())
}
