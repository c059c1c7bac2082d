//! Any bytes are a spec or an error, and an edit of a spec changes only the intended bytes. With
//! any annotations, the journal gets a single line, and the pod gets only the choices that the
//! node's config allows.

use std::path::Path;

use bindguard_core::identity::Identity;
use bindguard_core::policy::{Alarm, PodsMay, Policy, policy_of_pod};
use bindguard_core::report::Report;
use bindguard_core::spec::{RequestedPropagation, RootfsPropagation, SpecEdit, SpecView, Text};
use serde_json::value::RawValue;

/// Panics if a spec breaks these properties.
pub fn check(bytes: &[u8]) {
    let Ok(view) = SpecView::from_bytes(bytes) else {
        return;
    };
    assert_eq!(view.edited(&[]).unwrap(), bytes);
    annotated(&view);
    // Two binds, chosen by the length of the input: a large spec has many.
    let word = match &view.rootfs_propagation {
        RootfsPropagation::Set(word) => word.clone(),
        RootfsPropagation::Unset => String::new(),
    };
    let others = what_else(bytes, &word);
    for bind in view.binds().iter().skip(bytes.len() % 8).take(2) {
        pointed_elsewhere(&view, bind.index);
        made_rslave(&view, bind.index, &word, &others);
    }
}

fn annotated(view: &SpecView<'_>) {
    let of_pod = |node: &Policy| {
        let (policy, problems) = policy_of_pod(node, |name| view.annotation(name));
        (policy.into_owned(), problems)
    };
    let strict = Policy::default();
    let (policy, problems) = of_pod(&strict);
    assert_eq!(policy, strict);
    let open = Policy {
        pods_may: PodsMay {
            set_mode: true,
            set_propagation: true,
        },
        ..Policy::default()
    };
    let (policy, more) = of_pod(&open);
    assert!(
        ![policy.unmounted_volumes, policy.dead_sources, policy.proof].contains(&Alarm::Refuse)
    );
    let problems = [problems, more, view.overlooked().into_iter().collect()].concat();
    let line = serde_json::to_string(&Report {
        container: Identity::from_spec(view),
        problems,
        ..Report::default()
    });
    let line = line.unwrap();
    assert!(!line.contains(|c: char| c < ' '), "{line:?}");
    assert_eq!(
        serde_json::from_str::<&RawValue>(&line).unwrap().get(),
        line
    );
}

/// A single JSON string of the old bytes becomes the new source; all other bytes stay.
fn pointed_elsewhere(view: &SpecView<'_>, bind: usize) {
    let to = Path::new("/v/\"odd\"\n/app.conf");
    let quoted = br#""/v/\"odd\"\n/app.conf""#;
    let edited = view
        .edited(&[SpecEdit::Source {
            bind,
            to: to.into(),
        }])
        .unwrap();
    let old = view.bytes();
    let after = |at: usize| &edited[at + quoted.len()..];
    let mut places =
        (0..=edited.len() - quoted.len()).filter(|&at| edited[at..].starts_with(quoted));
    let found = places.any(|at| {
        let replaced = (at < old.len() && edited[..at] == old[..at])
            .then(|| {
                old.len()
                    .checked_sub(after(at).len())
                    .filter(|end| *end >= at)
            })
            .flatten()
            .map(|end| (&old[at..end], &old[end..]));
        replaced.is_some_and(|(word, rest)| {
            rest == after(at) && serde_json::from_slice::<Text<'_>>(word).is_ok()
        })
    });
    assert!(found, "bytes outside of the source have changed");
    let again = SpecView::from_bytes(&edited).unwrap();
    assert_eq!(
        again
            .binds()
            .iter()
            .find(|b| b.index == bind)
            .unwrap()
            .source(),
        to
    );
}

/// Words of propagation, and the keys that hold them, are all that differs.
fn made_rslave(view: &SpecView<'_>, bind: usize, word: &str, others: &[u8]) {
    let edits = [SpecEdit::BindRslave { bind }, SpecEdit::RootfsRslave];
    let edited = view.edited(&edits).unwrap();
    assert_eq!(what_else(&edited, word), others);
    let again = SpecView::from_bytes(&edited).unwrap();
    let requested = again
        .binds()
        .iter()
        .find(|b| b.index == bind)
        .unwrap()
        .propagation;
    assert!(
        matches!(
            requested,
            RequestedPropagation::RecursiveSlave | RequestedPropagation::Shared
        ),
        "{requested:?}"
    );
    assert_eq!(
        &again.rootfs_propagation,
        &RootfsPropagation::Set("rslave".into())
    );
    assert!(again.edited(&edits).is_ok());
}

/// The spec's words without those (`own` is the root filesystem's propagation), and without what
/// separates words.
fn what_else(spec: &[u8], own: &str) -> Vec<u8> {
    const ITS_WORDS: [&str; 12] = [
        "private",
        "rprivate",
        "slave",
        "rslave",
        "unbindable",
        "runbindable",
        "shared",
        "rshared",
        "options",
        "linux",
        "rootfsPropagation",
        "null",
    ];
    let (mut rest, mut others) = (spec, Vec::new());
    while let Some(first) = rest.first() {
        let length = if *first == b'"' {
            string_length(rest)
        } else {
            1
        };
        let (word, tail) = rest.split_at(length);
        rest = tail;
        let text: Option<Text<'_>> = serde_json::from_slice(word).ok();
        if let Some(tail) = word
            .len()
            .eq(&1)
            .then(|| rest.strip_prefix(b"ull"))
            .flatten()
            .filter(|_| word == b"n")
        {
            rest = tail;
        } else if !text.is_some_and(|Text(text)| text == own || ITS_WORDS.contains(&&*text))
            && !matches!(word, [b',' | b'[' | b']' | b'{' | b'}' | b':'])
        {
            others.extend_from_slice(word);
        }
    }
    others
}

/// The length of the JSON string at the start of `text`, with the quotes.
fn string_length(text: &[u8]) -> usize {
    let mut stream = serde_json::Deserializer::from_slice(text).into_iter::<&RawValue>();
    stream
        .next()
        .and_then(Result::ok)
        .map_or(1, |raw| raw.get().len())
}
