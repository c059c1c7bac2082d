//! Pods as a story writes them.

use serde_json::{Value, json};

use crate::image::BUSYBOX;

pub const NODE: &str = "node";

/// A pod with a volume and a container `app` that mounts the volume.
#[derive(Clone, Debug)]
pub struct PodManifest {
    name: String,
    annotations: Value,
    spec: Value,
}

impl PodManifest {
    /// A pod under containerd's own shim; `volume` is the volume's source, `mounts` are its mounts
    /// without their `name`. The container runs until it is killed.
    pub fn new(name: &str, volume: &Value, mounts: &[Value]) -> Self {
        let app = container("app", &["sleep", "1000000"], mounts);
        let mut source = volume.clone();
        source["name"] = json!("volume");
        let spec = json!({
            "nodeName": NODE,
            "hostNetwork": true,
            "dnsPolicy": "Default",
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [app],
            "volumes": [source],
        });
        Self {
            name: name.to_owned(),
            annotations: json!({"content": "one"}),
            spec,
        }
    }

    /// Under bindguard.
    pub fn guarded(self) -> Self {
        self.of_class("bindguard")
    }

    /// Sets the RuntimeClass.
    pub fn of_class(mut self, class: &str) -> Self {
        self.spec["runtimeClassName"] = json!(class);
        self
    }

    /// Adds an annotation.
    pub fn annotated(mut self, key: &str, value: &str) -> Self {
        self.annotations[key] = json!(value);
        self
    }

    /// In a user namespace of its own, and so with an address of its own: `hostUsers: false`.
    pub fn with_user_namespace(mut self) -> Self {
        self.spec["hostUsers"] = json!(false);
        self.spec["hostNetwork"] = json!(false);
        self
    }

    /// With a container that does this before, with the whole volume on `/volume`.
    pub fn first(mut self, command: &str) -> Self {
        let whole = [json!({"mountPath": "/volume"})];
        self.spec["initContainers"] = json!([container("first", &["sh", "-ec", command], &whole)]);
        self
    }

    /// Its container does this once, and then the pod has ended.
    pub fn once(mut self, command: &[&str]) -> Self {
        self.spec["restartPolicy"] = json!("Never");
        self.spec["containers"][0]["command"] = json!(command);
        self
    }

    pub fn object(&self) -> Value {
        let metadata = json!({"name": self.name, "annotations": self.annotations});
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.spec})
    }
}

fn container(name: &str, command: &[&str], mounts: &[Value]) -> Value {
    let mounts = mounts.iter().cloned().map(|mut mount| {
        mount["name"] = json!("volume");
        mount
    });
    json!({
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": "KEY", "value": "app.conf"}],
        "volumeMounts": mounts.collect::<Vec<_>>(),
    })
}
