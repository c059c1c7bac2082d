//! Everything in a `config.json` that bindguard does not edit stays the same, byte for byte:
//! unknown fields, numbers that no float can hold, odd escapes, keys that come twice. A spec that
//! cannot be read goes to the runtime untouched.

use bindguard_integration::bundle::Bundle;
use bindguard_integration::prelude::*;

const ODD: &str = r#"{ "ociVersion":"1.0.2",
  "futureField": {"big": 123456789012345678901234567890, "float": 1.0e+400, "odd": "a\u002fb\/c\ud83d\ude00\u0000"},
  "process":{"args":["true"],"cwd":"/","user":{"uid":0,"gid":0}},  "twice": 1, "twice": 2,
	"root":{"path":"rootfs"},
  "mounts":[ {"destination":"/proc","type":"proc","source":"proc"},MOUNT ],
  "linux": {"namespaces":[{"type":"mount"}], "rootfsPropagation" : "rslave", "intelRdt":{"closID":"x"}}  }
"#;

#[test]
fn nothing_to_edit() {
    Setup::on(Generation::V1_7).story(|node| {
        let spec = ODD.replace(
            "MOUNT",
            r#"{"destination":"\/tmp","type":"bind","source":"/usr","options":["rbind" , "ro"],"new":null}"#,
        );
        let bundle = Bundle::create(node, "calm", spec.as_bytes())?;
        admit(node, &bundle)?.success()?;
        ensure!(bundle.seen()? == spec.as_bytes(), "the runtime saw: {}", String::from_utf8_lossy(&bundle.seen()?));
        let arguments = bundle.arguments()?;
        ensure!(
            arguments.contains("--log-format json create --bundle") && arguments.trim_end().ends_with(" c1"),
            "{arguments}"
        );
        Ok(())
    });
}

#[test]
fn only_the_options_are_edited() {
    Setup::on(Generation::V1_7).story(|node| {
        let spec = ODD.replace(
            "MOUNT",
            r#"{"new":[1 ,2],"destination":"/host","type":"bind","source":"\u002f","options":["rbind","rprivate"]}"#,
        );
        let bundle = Bundle::create(node, "host-root", spec.as_bytes())?;
        admit(node, &bundle)?.success()?;
        let seen = String::from_utf8(bundle.seen()?)?;
        ensure!(seen.contains("\"rslave\"]"), "the bind was not made rslave: {seen}");
        let (before, after) = spec.split_once(r#"["rbind","rprivate"]"#).unwrap_or_default();
        ensure!(seen.starts_with(before), "bytes before the edit changed: {seen}");
        ensure!(seen.ends_with(after), "bytes after the edit changed: {seen}");
        // admitting twice changes nothing the second time
        admit(node, &bundle)?.success()?;
        ensure!(String::from_utf8(bundle.seen()?)? == seen, "the second admission edited again");
        Ok(())
    });
}

#[test]
fn a_re_bind_needs_no_edit() {
    Setup::on(Generation::V1_7).story(|node| {
        let pod = node.kubelet().pod("bytes")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let bind = Bundle::bind(subpath.bind()?, "/etc/app.conf");
        volume.update(&[("app.conf", "two")])?;
        let spec = ODD.replace("MOUNT", &bind.to_string());
        let bundle = Bundle::create(node, "stale", spec.as_bytes())?;
        admit(node, &bundle)?.success()?;
        ensure!(
            bundle.seen()? == spec.as_bytes(),
            "the runtime saw: {}",
            String::from_utf8_lossy(&bundle.seen()?)
        );
        only_a_current_mount(&subpath)?;
        pod.delete()
    });
}

#[test]
fn broken_spec_goes_to_the_runtime() {
    Setup::on(Generation::V1_7).story(|node| {
        let broken: [(&str, &[u8]); 4] = [
            ("half", br#"{"ociVersion":"1.0.2","mou"#),
            ("empty", b""),
            ("bytes", b"{\"a\":\"\xff\"}"),
            ("list", b"[1]"),
        ];
        for (name, bytes) in broken {
            let bundle = Bundle::create(node, name, bytes)?;
            let ended = admit(node, &bundle)?;
            ensure!(
                bundle.seen()? == bytes,
                "{name}: the runtime saw another spec"
            );
            let words = format!("{}{}", bundle.log().unwrap_or_default(), ended.stderr);
            ended.success()?;
            ensure!(
                words.contains("config.json"),
                "{name}: no word about the broken spec: {words}"
            );
        }
        Ok(())
    });
}

fn admit(node: &Node, bundle: &Bundle) -> Result<Finished> {
    run(bundle.admit(node)?)
}
