//! A CSI driver was restarted and mounted only its staging mount anew: the volume of a running pod
//! stays dead, and the report says what helps.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_operator::survey_node;
use bindguard_testing::scene::tmpfs;
use bindguard_testing::{Folder, Fuse, bind, own_namespace};
use nix::mount::umount;

const ADVICE: &str = "host mount dead, staging alive: ";

struct Scene {
    root: Folder,
    fuse: Fuse,
}

impl Scene {
    /// A volume whose daemon ended.
    fn new() -> Option<Self> {
        if !own_namespace() {
            return None;
        }
        let mut fuse = Fuse::mounted()?;
        fuse.device = None;
        let scene = Self {
            root: Folder::new(),
            fuse,
        };
        fs::create_dir_all(scene.publish()).unwrap();
        write_record(scene.publish().parent().unwrap(), "handle-1");
        bind(&scene.fuse.path(), &scene.publish());
        Some(scene)
    }

    fn publish(&self) -> PathBuf {
        let pod = self.root.path().join("pods/uid-1");
        pod.join("volumes/kubernetes.io~csi/pv-1/mount")
    }

    /// A staging folder of the driver; nothing is mounted there.
    fn staging(&self, hash: &str, handle: &str) -> PathBuf {
        let csi = self.root.path().join("plugins/kubernetes.io/csi");
        let folder = csi.join("blob.csi.azure.com").join(hash);
        fs::create_dir_all(folder.join("globalmount")).unwrap();
        write_record(&folder, handle);
        folder.join("globalmount")
    }

    /// The reason that `diagnose` and the events have.
    fn reason(&self) -> String {
        let places = Places {
            kubelet_roots: vec![self.root.path().to_owned()],
            ..Places::default()
        };
        let report = survey_node(&Policy::default(), &places, &Default::default(), |_| true);
        let json = serde_json::to_value(&report).unwrap();
        let binds = json["binds"].as_array().unwrap();
        assert_eq!(binds.len(), 1, "{json:#}");
        assert_eq!(binds[0]["verdict"], "dead", "{json:#}");
        binds[0]["reason"].as_str().unwrap().to_owned()
    }
}

fn write_record(folder: &Path, handle: &str) {
    let record = format!(
        r#"{{"driverName":"blob.csi.azure.com","volumeHandle":"{handle}","specVolID":"pv-1"}}"#
    );
    fs::write(folder.join("vol_data.json"), record).unwrap();
}

#[test]
fn a_volume_whose_driver_mounted_only_staging_anew_names_the_remedy() {
    let Some(scene) = Scene::new() else { return };
    assert!(!scene.reason().contains(ADVICE), "there is no staging");
    tmpfs(&scene.staging("0a1b", "handle-2"));
    assert!(!scene.reason().contains(ADVICE), "another volume's");
    let staging = scene.staging("2c3d", "handle-1");
    assert!(!scene.reason().contains(ADVICE), "nothing is mounted");
    bind(&scene.fuse.path(), &staging);
    assert!(!scene.reason().contains(ADVICE), "staging is dead as well");
    umount(&staging).unwrap();
    tmpfs(&staging);
    let reason = scene.reason();
    assert!(
        reason.contains("Transport endpoint is not connected"),
        "{reason}"
    );
    assert!(
        reason.contains(ADVICE) && reason.contains("only a new pod gets the new mount"),
        "{reason}"
    );
}

/// The folder of kubelets before 1.24.
#[test]
fn an_older_kubelet_has_staging_in_another_folder() {
    let Some(scene) = Scene::new() else { return };
    let pv = scene.root.path().join("plugins/kubernetes.io/csi/pv/pv-1");
    fs::create_dir_all(pv.join("globalmount")).unwrap();
    tmpfs(&pv.join("globalmount"));
    assert!(scene.reason().contains(ADVICE));
}
