use proptest::prelude::*;

use super::*;

fn memberships(text: &str) -> Vec<Membership<'_>> {
    text.lines().filter_map(Membership::parse).collect()
}

#[test]
fn lines_name_controllers_and_path() {
    let lines = memberships("2:cpu,cpuacct:/pods/a:b\n9:name=systemd:/\n0::/x\nodd\n");
    assert_eq!(lines.len(), 3);
    assert!(lines[0].has("cpuacct") && !lines[0].has("cpuac"));
    assert_eq!(
        (lines[0].path, lines[2].controllers, lines[2].path),
        ("/pods/a:b", "", "/x")
    );
}

#[test]
fn a_hybrid_node_is_version_1() {
    assert!(!is_unified(
        false,
        &memberships("4:memory:/a\n9:name=systemd:/\n0::/a\n")
    ));
    assert!(is_unified(false, &memberships("9:name=systemd:/\n0::/a\n")));
    // net_cls, or even pids, is mounted as version 1 on a node that is otherwise version 2.
    assert!(is_unified(true, &memberships("3:pids:/\n0::/a\n")));
}

#[test]
fn a_process_that_is_gone_is_an_error_that_names_its_file() {
    let error = find(u32::MAX).unwrap_err();
    assert_eq!(error.to_string(), format!("read /proc/{}/cgroup", u32::MAX));
}

#[test]
fn our_own_cgroup_is_also_found_by_the_mount_table() {
    let search = Search {
        pid: std::process::id(),
        mounts: OnceCell::new(),
    };
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    for membership in memberships(&text) {
        let controller = membership
            .controllers
            .split(',')
            .next()
            .filter(|name| !name.is_empty());
        let mut shown = search
            .mounts()
            .unwrap()
            .iter()
            .filter(|mount| mount.shows(controller));
        let is_found = shown.any(|mount| {
            mount
                .directory_of(membership.path)
                .is_some_and(|at| search.is_in(&at))
        });
        if !is_found {
            eprintln!(
                "SKIPPED: the hierarchy {:?} is not mounted here",
                membership.controllers
            );
        }
        if controller == Some("memory") {
            assert!(is_found);
        }
    }
}

proptest! {
    #[test]
    fn any_line_is_read_without_panic(text: String) {
        let _ = is_unified(false, &memberships(&text));
    }
}

#[test]
fn version_two_has_one_hierarchy_and_version_one_many() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["cpu", "memory"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
    }
    assert_eq!(hierarchies_in(dir.path()).len(), 2);
    fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
    assert_eq!(hierarchies_in(dir.path()), [dir.path()]);
}

#[test]
fn the_unified_hierarchy_of_a_hybrid_node_has_no_controllers() {
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str| dir.path().join(name);
    for name in ["memory", "unified"] {
        fs::create_dir(folder(name)).unwrap();
        fs::write(folder(name).join("cgroup.procs"), "").unwrap();
    }
    fs::write(folder("unified").join("cgroup.controllers"), "").unwrap();
    assert_eq!(hierarchies_in(dir.path()).len(), 2);
    assert_eq!(with_controllers(dir.path()), [folder("memory")]);
    fs::write(folder("cgroup.controllers"), "cpu").unwrap();
    assert_eq!(with_controllers(dir.path()), [dir.path()]);
}

/// From a hybrid node, with a mount as seen by a container without a cgroup namespace.
const MOUNTINFO: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
36 31 0:33 /docker/abc /my\\040cg/cpu,cpuacct rw,relatime shared:9 master:3 - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

#[test]
fn the_mounts_of_a_hybrid_node() {
    let mounts = CgroupMount::read_all(MOUNTINFO.as_bytes()).unwrap();
    assert_eq!(mounts.len(), 4);
    let of = |controller| mounts.iter().find(|mount| mount.shows(controller)).unwrap();
    assert_eq!(
        of(Some("memory")).directory_of("/pods/a"),
        Some("/sys/fs/cgroup/memory/pods/a".into())
    );
    assert_eq!(
        of(None).directory_of("/"),
        Some("/sys/fs/cgroup/unified/".into())
    );
    let cpu = of(Some("cpuacct"));
    assert_eq!(
        cpu.directory_of("/docker/abc/pods/a"),
        Some("/my cg/cpu,cpuacct/pods/a".into())
    );
    assert_eq!(
        cpu.directory_of("/docker/abc"),
        Some("/my cg/cpu,cpuacct".into())
    );
    assert_eq!(
        (cpu.directory_of("/docker/abcd"), cpu.directory_of("/pods")),
        (None, None)
    );
}

proptest! {
    #[test]
    fn any_line_of_mountinfo_is_read_without_panic(line: Vec<u8>, cgroup: String) {
        for mount in CgroupMount::read_all(line.as_slice()).unwrap() {
            let _ = mount.directory_of(&cgroup);
        }
    }

    #[test]
    fn a_cgroup_is_found_below_any_root(root in "(/[a-zé ]{1,5}){0,3}", below in "(/[a-z:é]{1,5}){1,3}") {
        let mounted = if root.is_empty() { "/" } else { &root };
        let escaped = mounted.replace(' ', "\\040");
        let line = format!("1 2 0:3 {escaped} /cg rw - cgroup2 cgroup2 rw");
        let mounts = CgroupMount::read_all(line.as_bytes()).unwrap();
        let directory = mounts[0].directory_of(&format!("{root}{below}"));
        prop_assert_eq!(directory, Some(PathBuf::from(format!("/cg{below}"))));
    }
}
