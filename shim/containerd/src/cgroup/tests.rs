use super::*;

#[test]
fn the_names_are_those_of_the_messages() {
    use containerd_shim_protos::{cgroups, cgroups_v2};
    use protobuf::MessageFull;
    let v1 = cgroups::metrics::Metrics::descriptor();
    let v2 = cgroups_v2::metrics::Metrics::descriptor();
    assert_eq!((v1.full_name(), v2.full_name()), (V1_NAME, V2_NAME));
}

#[test]
fn a_cgroup_without_a_file_is_gone() {
    let cgroup = Cgroup::V2("/nowhere/at/all".into());
    assert_eq!(cgroup.metrics(), None);
}

#[test]
fn the_option_goes_before_the_path_and_the_path_needs_a_systemd() {
    for path_is_systemds in [true, false] {
        assert!(decide(Some(true), path_is_systemds, || false));
        assert!(!decide(Some(false), path_is_systemds, || true));
    }
    assert!(decide(None, true, || true));
    assert!(!decide(None, true, || false));
    assert!(!decide(None, false, || true));
}

/// Tests on a plain folder, whose files keep what is written.
#[test]
fn missing_controllers_are_enabled_from_the_top_down_to_the_parent() {
    let dir = tempfile::tempdir().unwrap();
    let (root, slice) = (dir.path().join("cgroup"), dir.path().join("cgroup/pods"));
    let container = slice.join("c");
    fs::create_dir_all(&container).unwrap();
    let control = |cgroup: &Path| fs::read_to_string(cgroup.join(SUBTREE_CONTROL)).unwrap();
    for (cgroup, enabled) in [(&root, "cpu memory"), (&slice, "cpu "), (&container, "")] {
        fs::write(cgroup.join(CONTROLLERS), "cpu io memory pids\n").unwrap();
        fs::write(cgroup.join(SUBTREE_CONTROL), enabled).unwrap();
    }
    enable_controllers(&container);
    assert_eq!(control(&root), "cpu memory+io+pids");
    assert_eq!(control(&slice), "cpu +io+memory+pids");
    assert_eq!(control(&container), "", "a container decides for itself");
    enable_controllers(Path::new("/nowhere/at/all"));
}
