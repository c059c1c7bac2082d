//! Edits change the intended values, and no other byte.

use std::path::Path;

use bindguard_core::spec::{RequestedPropagation, RootfsPropagation, SpecEdit, SpecView};
use oci_spec::runtime::Spec;
use proptest::prelude::*;

/// A spec with what a typed round trip would lose: unknown fields, big numbers, odd escapes,
/// duplicate keys.
const ODD: &str = r#" {"ociVersion":"1.1.0", "futureField" : {"deep":[1e400, 123456789012345678901234567890, -0.0]},
  "\u006dounts":[ {"source":"\u002F","type":"bind","destination":"/r\u00f6t","options":["rbind" , "rprivate","ro"],"x":1},
    {"destination":"/etc/app","type":"bind","source":"/s/0","options":["rbind","ro"]} ],
  "linux":{"rootfsPropagation":"private","resources":{"a":1,"a":2},"rootfsPropagation":"shared"}  }
"#;

fn edited(json: &str, edits: &[SpecEdit]) -> String {
    String::from_utf8(
        SpecView::from_bytes(json.as_bytes())
            .unwrap()
            .edited(edits)
            .unwrap(),
    )
    .unwrap()
}

#[test]
fn no_edit_changes_no_byte() {
    assert_eq!(edited(ODD, &[]), ODD);
}

#[test]
fn only_the_values_that_count_are_replaced() {
    let edits = [
        SpecEdit::RootfsRslave,
        SpecEdit::BindRslave { bind: 0 },
        SpecEdit::Source {
            bind: 1,
            to: "/v/\"odd\"\n/app.conf".into(),
        },
        SpecEdit::BindRslave { bind: 1 },
    ];
    let expected = ODD
        .replace(r#""rprivate""#, r#""rslave""#)
        .replace(
            r#""rootfsPropagation":"shared""#,
            r#""rootfsPropagation":"rslave""#,
        )
        .replace(r#""source":"/s/0""#, r#""source":"/v/\"odd\"\n/app.conf""#)
        .replace(r#"["rbind","ro"]"#, r#"["rbind","ro","rslave"]"#);
    assert_eq!(edited(ODD, &edits), expected);
}

#[test]
fn a_missing_field_is_inserted_in_its_place() {
    let bind = r#"{"mounts":[{"type":"bind","source":"/"}]}"#;
    let edits = [SpecEdit::BindRslave { bind: 0 }, SpecEdit::RootfsRslave];
    assert_eq!(
        edited(bind, &edits),
        r#"{"linux":{"rootfsPropagation":"rslave"},"mounts":[{"type":"bind","source":"/","options":["rslave"]}]}"#
    );
    for (before, after) in [
        (
            r#"{"linux":{}}"#,
            r#"{"linux":{"rootfsPropagation":"rslave"}}"#,
        ),
        (
            r#"{"linux":{"a":1}}"#,
            r#"{"linux":{"rootfsPropagation":"rslave","a":1}}"#,
        ),
        (
            r#"{"linux":null}"#,
            r#"{"linux":{"rootfsPropagation":"rslave"}}"#,
        ),
        (
            r#"{"linux":{"rootfsPropagation":null}}"#,
            r#"{"linux":{"rootfsPropagation":"rslave"}}"#,
        ),
        (" {}", r#" {"linux":{"rootfsPropagation":"rslave"}}"#),
    ] {
        assert_eq!(edited(before, &[SpecEdit::RootfsRslave]), after);
    }
    for (before, after) in [
        ("[]", r#"["rslave"]"#),
        ("[ \n]", "[\"rslave\" \n]"),
        ("null", r#"["rslave"]"#),
        (r#"["slave","private"]"#, r#"["rslave","rslave"]"#),
    ] {
        let spec = |options| {
            format!(r#"{{"mounts":[{{"type":"bind","source":"/","options":{options}}}]}}"#)
        };
        assert_eq!(
            edited(&spec(before), &[SpecEdit::BindRslave { bind: 0 }]),
            spec(after)
        );
    }
}

/// An independent reader sees exactly the intended change: the typed spec before, with two fields
/// set by hand, equals the typed spec after.
#[test]
fn a_typed_reader_sees_only_the_edit() {
    let before = include_bytes!("../fixtures/kubelet-1.36/config-hostroot.json");
    let view = SpecView::from_bytes(before).unwrap();
    let root = view
        .binds()
        .iter()
        .find(|bind| bind.source() == Path::new("/"))
        .unwrap()
        .index;
    let after = view
        .edited(&[SpecEdit::BindRslave { bind: root }, SpecEdit::RootfsRslave])
        .unwrap();

    let mut expected: Spec = serde_json::from_slice(before).unwrap();
    let mut mounts = expected.mounts().clone().unwrap();
    let rslave = |option: &String| {
        if option == "rprivate" {
            "rslave".to_owned()
        } else {
            option.clone()
        }
    };
    let options = mounts[root]
        .options()
        .as_ref()
        .unwrap()
        .iter()
        .map(rslave)
        .collect();
    mounts[root].set_options(Some(options));
    expected.set_mounts(Some(mounts));
    let mut linux = expected.linux().clone().unwrap();
    linux.set_rootfs_propagation(Some("rslave".to_owned()));
    expected.set_linux(Some(linux));
    assert_eq!(serde_json::from_slice::<Spec>(&after).unwrap(), expected);
}

#[test]
fn an_edit_of_a_mount_that_is_no_bind_is_refused() {
    let view = SpecView::from_bytes(ODD.as_bytes()).unwrap();
    let error = view
        .edited(&[SpecEdit::BindRslave { bind: 7 }])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "edit mounts[7]: it is no bind of this spec"
    );
}

fn options() -> impl Strategy<Value = Vec<&'static str>> {
    let known = [
        "rbind", "bind", "ro", "rw", "private", "rprivate", "slave", "rslave", "nosuid",
    ];
    proptest::collection::vec(prop::sample::select(known.to_vec()), 0..6)
}

proptest! {
    #[test]
    fn a_bind_made_rslave_requests_rslave_and_stays_so(options in options()) {
        let spec = serde_json::json!({"mounts": [{"type": "bind", "source": "/", "options": options}]}).to_string();
        let once = edited(&spec, &[SpecEdit::BindRslave { bind: 0 }, SpecEdit::RootfsRslave]);
        let view = SpecView::from_bytes(once.as_bytes()).unwrap();
        prop_assert_eq!(view.binds()[0].propagation, RequestedPropagation::RecursiveSlave);
        prop_assert_eq!(&view.rootfs_propagation, &RootfsPropagation::Set("rslave".into()));
    }
}
