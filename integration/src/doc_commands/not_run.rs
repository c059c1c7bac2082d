//! The commands that no story runs, with the reasons.

/// A command that a document shows and no story runs.
#[derive(Clone, Copy, Debug)]
pub struct NotRun {
    pub document: &'static str,
    /// The beginning of the command.
    pub command: &'static str,
    /// The command that runs instead.
    pub instead: &'static str,
    pub why: &'static str,
}

/// All of them.
pub const NOT_RUN: [NotRun; 19] = [
    NotRun {
        document: "CONTRIBUTING.md",
        command: "cargo test -p bindguard-guard --test it -- hostile_volumes::",
        instead: "test -f hooks/guard/tests/it/hostile_volumes.rs",
        why: "it is a test beside this one",
    },
    NotRun {
        document: "CONTRIBUTING.md",
        command: "make programs matrix && make story NAME=live_refresh::",
        instead: "make --dry-run story NAME=live_refresh:: && test -f integration/tests/it/live_refresh.rs",
        why: "it is a story beside this one",
    },
    NotRun {
        document: "docs/fleet.md",
        command: "make image BUILD_IMAGE=",
        instead: "make --dry-run image BUILD_IMAGE=here",
        why: "it needs a compiler's image; image_from_the_sources.rs builds it, by make image-check",
    },
    NotRun {
        document: "README.md",
        command: "kubectl bindguard",
        instead: "test -f integration/tests/it/kubectl_plugin.rs",
        why: "it needs a cluster; docs/agent.md has it, and that story runs it",
    },
    NotRun {
        document: "docs/install.md",
        command: "kubectl debug node/NODE",
        instead: "kubectl debug node/node --help",
        why: "it needs a cluster; operator_reads_the_status.rs runs doctor with --root",
    },
    NotRun {
        document: "docs/docker.md",
        command: "docker run --label bindguard.refresh=true",
        instead: "test -f integration/tests/it/an_edited_file_reaches_docker_and_podman.rs",
        why: "it needs a registry; this story runs the same with an image of its own",
    },
    NotRun {
        document: "docs/docker.md",
        command: "podman run --annotation bindguard.refresh=true",
        instead: "test -f integration/tests/it/an_edited_file_reaches_docker_and_podman.rs",
        why: "it needs a registry; the same story runs it with an image of its own",
    },
    NotRun {
        document: "docs/support.md",
        command: "skopeo copy --all oci-archive:",
        instead: "test -f integration/tests/it/an_archive_of_the_image.rs",
        why: "it needs a registry; that story reads the archive with containerd",
    },
    NotRun {
        document: "docs/support.md",
        command: "ctr --namespace k8s.io images import",
        instead: "test -f integration/tests/it/an_archive_of_the_image.rs",
        why: "it needs a release; that story imports such an archive",
    },
    NotRun {
        document: "docs/support.md",
        command: "helm push",
        instead: "test -f config/chart/Chart.yaml",
        why: "it needs a registry",
    },
    NotRun {
        document: "README.md",
        command: "make demo",
        instead: "make --dry-run demo",
        why: "it builds; demo_leaves_nothing_behind.rs runs the demo",
    },
    NotRun {
        document: "README.md",
        command: "make test",
        instead: "make --dry-run test",
        why: "it is what runs the stories",
    },
    NotRun {
        document: "README.md",
        command: "make build",
        instead: "make --dry-run build",
        why: "it builds; what it builds is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "sh integration/matrix/fetch.sh",
        instead: "sh -n integration/matrix/fetch.sh",
        why: "it fetches hundreds of megabytes; what it lays out is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "sh integration/matrix/go.sh",
        instead: "sh -n integration/matrix/go.sh",
        why: "it fetches hundreds of megabytes; what it lays out is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo build --workspace",
        instead: "test -f Cargo.toml",
        why: "it builds",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo test -p bindguard-integration --test it -- updates_during_starts::",
        instead: "test -f integration/tests/it/updates_during_starts.rs",
        why: "it is a story beside this one",
    },
    NotRun {
        document: "docs/fleet.md",
        command: "kubectl --namespace kube-system get pods --output wide --selector app.kubernetes.io/name=bindguard-removal",
        instead: "test -f integration/tests/it/chart_on_a_cluster.rs",
        why: "it needs a cluster where helm uninstall ended too early: that story has one",
    },
    NotRun {
        document: "docs/fleet.md",
        command: "kubectl --namespace kube-system delete daemonset,job",
        instead: "test -f integration/tests/it/chart_on_a_cluster.rs",
        why: "it needs a cluster where helm uninstall ended too early: that story has one",
    },
];
