//! FUSE daemons in the kubelet's cgroup: a restart of the kubelet ends them. From then on all their
//! mounts fail with "transport endpoint is not connected" (Kubernetes' PR 49640 starts its own by
//! `systemd-run --scope`).

use super::Point;
use crate::node::Process;

const NAME: &str = "fuse-daemons";

/// The point for them. `kubelets`: the kubelets of this node; `daemons`: the processes that have
/// /dev/fuse open.
pub fn fuse_daemons(kubelets: &[Process], daemons: &[Process]) -> Point {
    let homes: Vec<(&str, &str)> = kubelets
        .iter()
        .filter_map(|kubelet| home(&kubelet.cgroup))
        .collect();
    let lives_in = |daemon: &&Process| {
        homes.iter().any(|(hierarchy, path)| {
            let own = lines(&daemon.cgroup).find(|(of, _)| of == hierarchy);
            own.and_then(|(_, own)| own.strip_prefix(path))
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    let at_risk: Vec<&Process> = daemons.iter().filter(lives_in).collect();
    let Some(first) = at_risk.first() else {
        let message = if kubelets.is_empty() {
            "no kubelet runs here"
        } else {
            "none lives in the kubelet's cgroup"
        };
        return Point::ok(NAME, message);
    };
    let names: Vec<String> = at_risk
        .iter()
        .map(|daemon| format!("{} ({})", daemon.command, daemon.pid))
        .collect();
    let message = format!(
        "in the kubelet's cgroup, and dead when it restarts: {}",
        names.join(", ")
    );
    Point::failed(NAME, message, into_a_scope(first.pid))
}

/// The command that moves a running process into its own scope, as `systemd-run --scope` does for a
/// new process.
fn into_a_scope(pid: u32) -> String {
    format!(
        "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit \
         'ssa(sv)a(sa(sv))' fuse-{pid}.scope fail 1 PIDs au 1 {pid} 0"
    )
}

/// The cgroup that ends with the kubelet: systemd's. If systemd's is `/`, that of any hierarchy
/// that is more than a slice.
fn home(cgroup: &str) -> Option<(&str, &str)> {
    let is_systemds = |hierarchy: &str| hierarchy.is_empty() || hierarchy == "name=systemd";
    let message = |(_, path): &(&str, &str)| *path != "/";
    let systemds = lines(cgroup)
        .filter(|(hierarchy, _)| is_systemds(hierarchy))
        .find(message);
    systemds.or_else(|| {
        lines(cgroup)
            .filter(|(_, path)| path.matches('/').count() > 1)
            .find(message)
    })
}

/// The hierarchies and paths of a `/proc/PID/cgroup`.
fn lines(cgroup: &str) -> impl Iterator<Item = (&str, &str)> {
    cgroup
        .lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    fn process(pid: u32, cgroup: &str) -> Process {
        Process {
            pid,
            command: "sshfs".to_owned(),
            cgroup: cgroup.to_owned(),
        }
    }

    #[test]
    fn a_process_in_or_below_the_kubelets_cgroup_dies_with_it() {
        let kubelet = [process(1, "0::/system.slice/kubelet.service\n")];
        for (cgroup, state) in [
            ("0::/system.slice/kubelet.service\n", PointStatus::Failed),
            (
                "0::/system.slice/kubelet.service/below\n",
                PointStatus::Failed,
            ),
            ("0::/system.slice/kubelet.service-not\n", PointStatus::Ok),
            ("0::/system.slice/run-1.scope\n", PointStatus::Ok),
        ] {
            assert_eq!(
                fuse_daemons(&kubelet, &[process(7, cgroup)]).status,
                state,
                "{cgroup}"
            );
        }
        assert_eq!(
            fuse_daemons(&[], &[process(7, "0::/\n")]).status,
            PointStatus::Ok
        );
    }

    #[test]
    fn without_systemd_any_hierarchy_is_used() {
        let text = "5:pids:/n/node\n1:name=systemd:/\n0::/\n";
        assert_eq!(
            fuse_daemons(&[process(1, text)], &[process(7, text)]).status,
            PointStatus::Failed
        );
        let slice = "5:cpu:/system.slice\n1:name=systemd:/system.slice/kubelet.service\n";
        let other = "5:cpu:/system.slice\n1:name=systemd:/system.slice/sshfs.service\n";
        assert_eq!(
            fuse_daemons(&[process(1, slice)], &[process(7, other)]).status,
            PointStatus::Ok
        );
    }
}
