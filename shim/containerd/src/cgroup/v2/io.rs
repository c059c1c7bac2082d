//! Block devices, see "IO Interface Files" in admin-guide/cgroup-v2.

use containerd_shim_protos::cgroups_v2::metrics::{IOEntry, IOStat};

use super::pressure;
use crate::cgroup::directory::Directory;
use crate::cgroup::text::{device, nested_keyed};

/// Bytes read and written, and pressure; none if neither exists.
pub(super) fn stat(directory: &Directory) -> Option<IOStat> {
    let (usage, psi) = (
        directory.text("io.stat"),
        pressure::of(directory, "io.pressure"),
    );
    if usage.is_none() && psi.is_none() {
        return None;
    }
    let usage = usage.map(|text| entries(&text)).unwrap_or_default();
    Some(IOStat {
        usage,
        psi: psi.into(),
        ..Default::default()
    })
}

/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`
fn entries(text: &str) -> Vec<IOEntry> {
    let entry = |(name, pairs): (&str, Vec<(&str, &str)>)| {
        let (major, minor) = device(name)?;
        let of = |key: &str| {
            let pair = pairs.iter().find(|(name, _)| *name == key);
            pair.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
        };
        Some(IOEntry {
            major,
            minor,
            rbytes: of("rbytes"),
            wbytes: of("wbytes"),
            rios: of("rios"),
            wios: of("wios"),
            ..Default::default()
        })
    };
    nested_keyed(text).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cgroup::live::Fixture;

    #[test]
    fn devices_and_pressure() {
        // The first line is from admin-guide/cgroup-v2.
        let fixture = Fixture::of(&[
            (
                "io.stat",
                "8:16 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0\n7:1\n",
            ),
            (
                "io.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
            ),
        ]);
        let stat = stat(&fixture.directory()).unwrap();
        let [entry] = stat.usage.as_slice() else {
            panic!("{:?}", stat.usage)
        };
        assert_eq!((entry.major, entry.minor), (8, 16));
        assert_eq!(
            (entry.rbytes, entry.wbytes, entry.rios, entry.wios),
            (1_459_200, 314_773_504, 192, 353)
        );
        assert_eq!(stat.psi.some.total, 5);
    }

    #[test]
    fn pressure_is_there_without_the_controller() {
        let fixture = Fixture::of(&[("io.pressure", "some total=5\n")]);
        assert!(stat(&fixture.directory()).is_some_and(|stat| stat.usage.is_empty()));
        assert!(stat(&Fixture::of(&[]).directory()).is_none());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9:x]{0,8}( (rbytes|x)?=?[0-9x]{0,3}){0,3}\n){0,3}", any: String) {
            let _ = (entries(&text), entries(&any));
        }
    }
}
