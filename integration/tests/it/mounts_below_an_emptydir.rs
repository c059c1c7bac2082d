//! The host mounts a folder below a pod's emptyDir, and the pod ends. The kubelet would remove the
//! files of that folder (kubernetes#129550). With `mounts-below-emptydir = "detach"` the mount goes
//! with the pod's sandbox, also if the shim is killed.

use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::mounts;
use bindguard_integration::prelude::*;

const UID: &str = "d3ddcaaf-0088-4d72-b57b-f31f05314446";
const DETACH: &str = "[checks]\nmounts-below-emptydir = \"detach\"\n";

on_newest_and_older!(it_goes_with_the_pod);

fn it_goes_with_the_pod(generation: Generation) {
    Setup::on(generation).cri().policy(DETACH).story(|node| {
        let scene = Scene::new(node)?;
        scene.sandbox_starts_and_ends(|cri, pod| cri.remove_pod(pod))?;
        scene.is_detached()
    });
}

#[test]
fn it_goes_if_the_shim_is_killed() {
    Setup::on(Generation::V2_1)
        .cri()
        .policy(DETACH)
        .story(|node| {
            let scene = Scene::new(node)?;
            scene.sandbox_starts_and_ends(|cri, pod| {
                for shim in node.shims()? {
                    kill(Pid::from_raw(shim.try_into()?), Signal::SIGKILL)?;
                }
                until("containerd has deleted the container", || {
                    Ok(!is_mounted(&scene.place)?)
                })?;
                // containerd may still be deleting the sandbox; the kubelet tries again, too
                until("the pod is removed", || Ok(cri.remove_pod(pod).is_ok()))
            })?;
            scene.is_detached()
        });
}

/// The default reports, and changes nothing.
#[test]
fn it_stays_by_default() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let scene = Scene::new(node)?;
        let command = format!("umount {}", scene.place.display());
        for verb in ["doctor", "diagnose"] {
            let said = node.bindguard([verb])?;
            ensure!(
                said.code() == 1 && said.stdout.contains(&command),
                "{verb}: {said:?}"
            );
        }
        let said = node.bindguard(["diagnose", "--json"])?;
        let report: Value = serde_json::from_str(&said.stdout)?;
        let found = &report["mounts_below_emptydir"];
        ensure!(
            found[0]["pod"]["uid"] == UID && found[0]["command"] == command.as_str(),
            "{said:?}"
        );
        ensure!(found[0]["erased"] == true && found[1].is_null(), "{said:?}");
        scene.is_reported_by_the_agent(&command)?;
        scene.sandbox_starts_and_ends(|cri, pod| cri.remove_pod(pod))?;
        ensure!(is_mounted(&scene.place)?, "it was detached");
        host(["umount".as_ref(), scene.place.as_os_str()]).map(drop)
    });
}

struct Scene<'n> {
    node: &'n Node,
    data: PathBuf,
    place: PathBuf,
}

impl<'n> Scene<'n> {
    fn new(node: &'n Node) -> Result<Self> {
        let pod = node.kubelet().root().join("pods").join(UID);
        let place = pod.join("volumes/kubernetes.io~empty-dir/scratch/disk");
        let data = node.disk().join("data");
        for folder in [&place, &data] {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        fs::write(data.join("file"), "precious")?;
        host([
            "mount".as_ref(),
            "--bind".as_ref(),
            data.as_os_str(),
            place.as_os_str(),
        ])?;
        Ok(Self { node, data, place })
    }

    fn sandbox_starts_and_ends(
        &self,
        end: impl FnOnce(&Cri, &Sandbox) -> Result<()>,
    ) -> Result<()> {
        let cri = self.node.cri()?;
        let pod = cri.run_pod("bindguard", "web", UID)?;
        ensure!(is_mounted(&self.place)?, "it went while the pod runs");
        end(&cri, &pod)
    }

    /// By a figure, and by an event on the running pod.
    fn is_reported_by_the_agent(&self, command: &str) -> Result<()> {
        let api = KubeApi::start()?;
        let kubeconfig = self.node.disk().join("kubeconfig");
        api.write_config(&kubeconfig)?;
        let config = format!(
            "agent.events.mode = 'warnings'\nagent.survey-seconds = 1\nagent.kubernetes = {{ kubeconfig = '{}', node = 'node-1' }}\n",
            kubeconfig.display()
        );
        let agent = Agent::start(self.node, &config)?;
        self.sandbox_starts_and_ends(|cri, pod| {
            until("there is an event on the pod", || {
                Ok(api.events().iter().any(|event| {
                    let message = event["message"].as_str().unwrap_or_default();
                    event["involvedObject"]["name"] == "web"
                        && event["reason"] == "MountBelowEmptyDir"
                        && message.contains(command)
                }))
            })?;
            cri.remove_pod(pod)
        })?;
        let figure = agent.figure("bindguard_mounts_below_emptydir");
        ensure!(figure == 1.0, "{figure}");
        Ok(())
    }

    fn is_detached(&self) -> Result<()> {
        ensure!(!is_mounted(&self.place)?, "it is still there");
        ensure!(fs::read_to_string(self.data.join("file"))? == "precious");
        let journal = fs::read_to_string(JOURNAL)?;
        let place = self.place.display().to_string();
        let line = journal.lines().find(|line| line.contains(&place));
        let line = line.with_context(|| format!("no line in {journal}"))?;
        ensure!(
            line.contains("\"by\":\"guard\"") && line.contains("\"result\":\"released\""),
            "{line}"
        );
        Ok(())
    }
}

fn is_mounted(place: &Path) -> Result<bool> {
    Ok(mounts::table()?.iter().any(|mount| mount.target == place))
}
