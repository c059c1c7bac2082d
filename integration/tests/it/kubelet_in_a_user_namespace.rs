//! A rootless kubelet: root of a user namespace and of a mount namespace of its own, in which what
//! came from outside is locked. A subpath that went stale there is re-bound there, and the
//! machine's mounts stay as they are.

use bindguard_integration::bundle::Bundle;
use bindguard_integration::prelude::*;
use bindguard_integration::{mounts, privilege};

/// The steps of such a kubelet until its container is created, and the result.
const KUBELET: &str = r#"
set -e
pod=$1; shift
volume=$pod/volumes/kubernetes.io~configmap/conf
subpath=$pod/volume-subpaths/conf/app/0
payload() {
  mkdir -p "$volume/..2026_11_21_05_10_00.$1"
  echo "$1" > "$volume/..2026_11_21_05_10_00.$1/app.conf"
  ln -s "..2026_11_21_05_10_00.$1" "$volume/..data_tmp"
  mv -T "$volume/..data_tmp" "$volume/..data"
}
payload 1
mkdir -p "${subpath%/*}"
: > "$subpath"
mount --bind "$volume/..data/app.conf" "$subpath"
payload 2
rm -r "$volume/..2026_11_21_05_10_00.1"
"$@"
echo "shows $(cat "$subpath"), mounts: $(grep -c "$subpath" /proc/self/mountinfo)"
umount "$subpath"
"#;

#[test]
fn story() {
    Setup::on(Generation::NEWEST).story(|node| {
        let root = node.kubelet().root();
        let pod = root.join("pods/uid-1");
        let subpath = pod.join("volume-subpaths/conf/app/0");
        let spec = Bundle::spec(&[Bundle::bind(&subpath, "/etc/app.conf")]).to_string();
        let bundle = Bundle::create(node, "rootless", spec.as_bytes())?;
        if !may_make_user_namespaces() {
            privilege::skipped("no user namespaces here");
            return Ok(());
        }
        let before = mounts::table()?.len();
        for propagation in ["private", "shared"] {
            let pod = pod.to_str().context("the pod's path is UTF-8")?;
            let way = format!("--propagation={propagation}");
            let words = [
                "unshare",
                "--user",
                "--map-root-user",
                "--mount",
                &way,
                "sh",
                "-c",
                KUBELET,
                "kubelet",
                pod,
            ];
            let ended = run(bundle.admit_under(node, &words)?)?;
            let said = ended.clone().success()?;
            ensure!(
                said.trim() == "shows 2, mounts: 1",
                "{propagation}: {said:?}, {ended:?}"
            );
            ensure!(
                bundle.seen()? == spec.as_bytes(),
                "{propagation}: the spec was edited"
            );
            fs::remove_dir_all(pod).context("remove the pod")?;
        }
        ensure!(
            mounts::table()?.len() == before,
            "mounts were left on the machine"
        );
        Ok(())
    });
}

fn may_make_user_namespaces() -> bool {
    host(["unshare", "--user", "--map-root-user", "--mount", "true"]).is_ok()
}
