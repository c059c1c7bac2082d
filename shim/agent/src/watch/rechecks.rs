//! Volumes that are checked again a moment after an update.
//!
//! A kubelet may bind a subpath from the old payload in the very moment of the update
//! (kubernetes#127602). No event reports a bind. The update lands 60 to 230 ms around the bind.

use std::time::{Duration, Instant};

use bindguard_guard::refresh::VolumeOfPod;

/// The times after an update at which its volume is checked again.
const AFTER: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// The checks that are due later.
#[derive(Debug, Default)]
pub struct Rechecks(Vec<(Instant, VolumeOfPod)>);

impl Rechecks {
    /// Plans the checks after an update. An earlier plan for the same volume is replaced.
    pub fn plan(&mut self, volume: &VolumeOfPod, now: Instant) {
        self.0.retain(|(_, planned)| planned != volume);
        self.0
            .extend(AFTER.map(|after| (now + after, volume.clone())));
    }

    /// The time of the next check.
    pub fn next(&self) -> Option<Instant> {
        self.0.iter().map(|(due, _)| *due).min()
    }

    /// Removes and returns the volumes that are due.
    pub fn due(&mut self, now: Instant) -> Vec<VolumeOfPod> {
        self.0
            .extract_if(.., |(due, _)| *due <= now)
            .map(|(_, volume)| volume)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_checked_twice_after_its_last_update() {
        let volume = |name: &str| VolumeOfPod {
            kubelet_root: "/k".into(),
            pod_uid: "u".to_owned(),
            volume: name.to_owned(),
        };
        let (mut rechecks, start) = (Rechecks::default(), Instant::now());
        assert_eq!(rechecks.next(), None);
        (0..1000).for_each(|_| rechecks.plan(&volume("a"), start));
        rechecks.plan(&volume("b"), start + AFTER[0]);
        assert_eq!(rechecks.next(), Some(start + AFTER[0]));
        assert_eq!(rechecks.due(start + AFTER[0]), [volume("a")]);
        assert_eq!(rechecks.due(start + AFTER[1]), [volume("a"), volume("b")]);
        assert_eq!(rechecks.due(start + AFTER[0] + AFTER[1]), [volume("b")]);
        assert_eq!(rechecks.next(), None);
    }
}
