//! Specs that the stock shim and runc read, because Go's `encoding/json` does, and that a stricter
//! reader refuses: `null` in odd places, duplicate keys, half of a surrogate pair, escaped keys.
//! Their containers and execs run (issue 14).

use bindguard_integration::prelude::*;
use bindguard_integration::shim::{Bundle, Shim, spec};
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;

/// Put behind the brace that opens the spec.
const ODD: [&str; 7] = [
    r#""annotations":null,"#,
    r#""annotations":{"a":null},"#,
    r#""annotations":{"a":"1","a":"2"},"annotations":{"b":"3"},"#,
    r#""annotations":{"a\ud800":"\udfff"},"hostname":"\ud800","#,
    r#""\u0061nnotations":{"\u0062":"3"},"#,
    r#""linux":null,"#,
    r#""linux":{"cgroupsPath":null,"namespaces":null},"#,
];
const EXEC: &str = r#"{"\u0061rgs":["false"],"args":["true"],"cwd":"/","env":["PATH=/bin"],"user":{"uid":0,"gid":0,"\ud800":null}}"#;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        for (number, odd) in ODD.iter().enumerate() {
            runs(node, &format!("odd{number}"), odd)
                .with_context(|| format!("a spec with {odd}"))?;
        }
        before.are_all(node)
    });
}

fn runs(node: &Node, id: &str, odd: &str) -> Result<()> {
    let whole = spec(node, id, &["sleep", "1000"]);
    let bundle = Bundle::create_with(node, id, &whole)?;
    fs::write(
        bundle.path().join("config.json"),
        format!("{{{odd}{}", &whole.to_string()[1..]),
    )?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    client.create(&bundle.request())?;
    client.start(id, "")?;
    let process = Any {
        value: EXEC.as_bytes().to_owned(),
        ..Default::default()
    };
    let exec = ExecProcessRequest {
        id: id.to_owned(),
        exec_id: "e".to_owned(),
        spec: Some(process).into(),
        ..Default::default()
    };
    client.call(async |task, context| task.exec(context, &exec).await)?;
    client.start(id, "e")?;
    ensure!(client.wait(id, "e")? == 0, "the exec ran another program");
    client.delete(id, "e")?;
    client.kill(id, "", 9)?;
    client.wait(id, "")?;
    client.delete(id, "")?;
    Ok(client.shut_down(id)?)
}
