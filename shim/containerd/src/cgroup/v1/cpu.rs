//! Processor time, from the controllers cpuacct (usage) and cpu (throttling), see
//! admin-guide/cgroup-v1/cpuacct and scheduler/sched-bwc.

use containerd_shim_protos::cgroups::metrics::{CPUStat, CPUUsage, Throttle};
use protobuf::MessageField;

use crate::cgroup::directory::Directory;

/// cpuacct.stat counts in USER_HZ, which is 100 on every architecture that containers run on.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// The figures of both controllers; `None` if both lack figures.
pub(super) fn stat(cpuacct: Option<&Directory>, cpu: Option<&Directory>) -> Option<CPUStat> {
    let (usage, throttling) = (cpuacct.and_then(usage), cpu.and_then(throttling));
    if usage.is_none() && throttling.is_none() {
        return None;
    }
    Some(CPUStat {
        usage: MessageField::some(usage.unwrap_or_default()),
        throttling: MessageField::some(throttling.unwrap_or_default()),
        ..Default::default()
    })
}

fn usage(directory: &Directory) -> Option<CPUUsage> {
    let total = directory.number("cpuacct.usage")?;
    let ticks = directory.flat_keyed("cpuacct.stat");
    let nanoseconds = |key| {
        ticks
            .as_ref()
            .map_or(0, |ticks| ticks.of(key))
            .saturating_mul(NANOSECONDS_PER_TICK)
    };
    Some(CPUUsage {
        total,
        kernel: nanoseconds("system"),
        user: nanoseconds("user"),
        per_cpu: directory
            .text("cpuacct.usage_percpu")
            .map(|text| per_cpu(&text))
            .unwrap_or_default(),
        ..Default::default()
    })
}

/// A single line, a number per processor. A bad number discards all: the next numbers would be
/// assigned to the wrong processor.
fn per_cpu(text: &str) -> Vec<u64> {
    let figures: Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    figures.unwrap_or_default()
}

fn throttling(directory: &Directory) -> Option<Throttle> {
    let stat = directory.flat_keyed("cpu.stat")?;
    Some(Throttle {
        periods: stat.of("nr_periods"),
        throttled_periods: stat.of("nr_throttled"),
        throttled_time: stat.of("throttled_time"),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::live::Fixture;

    #[test]
    fn ticks_become_nanoseconds() {
        // From Linux 6.18.
        let used = Fixture::of(&[
            ("cpuacct.usage", "2589794180066\n"),
            ("cpuacct.stat", "user 148474\nsystem 110505\n"),
            ("cpuacct.usage_percpu", "1282271994253 1307522797749 \n"),
        ]);
        let withheld = Fixture::of(&[(
            "cpu.stat",
            "nr_periods 5\nnr_throttled 2\nthrottled_time 9\nnr_bursts 0\nburst_time 0\n",
        )]);
        let stat = stat(Some(&used.directory()), Some(&withheld.directory())).unwrap();
        assert_eq!(stat.usage.total, 2_589_794_180_066);
        assert_eq!(
            (stat.usage.user, stat.usage.kernel),
            (1_484_740_000_000, 1_105_050_000_000)
        );
        assert_eq!(stat.usage.per_cpu, [1_282_271_994_253, 1_307_522_797_749]);
        let throttling = &stat.throttling;
        assert_eq!(
            (
                throttling.periods,
                throttling.throttled_periods,
                throttling.throttled_time
            ),
            (5, 2, 9)
        );
    }

    #[test]
    fn one_controller_is_enough_and_the_other_part_is_there_but_empty() {
        let used = Fixture::of(&[("cpuacct.usage", "7\n")]);
        let stat = stat(Some(&used.directory()), None).unwrap();
        assert_eq!((stat.usage.total, stat.throttling.is_some()), (7, true));
        assert!(super::stat(None, Some(&Fixture::of(&[]).directory())).is_none());
    }

    #[test]
    fn an_odd_number_leaves_no_processor_in_the_wrong_place() {
        assert!(per_cpu("1 x 3").is_empty());
    }
}
