//! A container image without a registry: a layer with the machine's static busybox, as an OCI
//! archive.
//!
//! `ctr image import` takes it. The same layer serves as the pods' sandbox image under a second
//! name, because a pause container needs nothing but a process that sleeps. Layout: the OCI
//! image-spec, `image-layout.md`.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The image that containers of stories run.
pub const BUSYBOX: &str = "bindguard.test/busybox:1";
/// The sandbox image of pods.
pub const PAUSE: &str = "bindguard.test/pause:1";

const APPLETS: [&str; 25] = [
    "sh", "cat", "df", "echo", "env", "false", "grep", "head", "id", "kill", "ls", "dd", "mkdir",
    "mount", "ps", "rm", "sleep", "stat", "stty", "tail", "test", "touch", "true", "tty", "wc",
];
const FOLDERS: [&str; 9] = [
    "bin", "dev", "etc", "mnt", "proc", "run", "sys", "tmp", "var",
];

/// Writes the archive with both images to `archive`.
pub fn write(archive: &Path) -> Result<()> {
    write_images(
        archive,
        layer(&busybox()?)?,
        "/bin",
        &[
            (BUSYBOX, json!(["sh"])),
            (PAUSE, json!(["sleep", "1000000000"])),
        ],
    )
}

/// Writes an archive with an image of `programs`, each at its path in the image, and with `PATH`.
pub fn write_programs(
    archive: &Path,
    name: &str,
    path: &str,
    programs: &[(PathBuf, PathBuf)],
) -> Result<()> {
    let mut tar = Builder::new(Vec::new());
    for (program, place) in programs {
        let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
        let place = place.strip_prefix("/").unwrap_or(place);
        append(&mut tar, &place.display().to_string(), &bytes, 0o755)?;
    }
    write_images(
        archive,
        tar.into_inner().context("write the layer")?,
        path,
        &[(name, json!([]))],
    )
}

fn write_images(
    archive: &Path,
    layer: Vec<u8>,
    path: &str,
    images: &[(&str, Value)],
) -> Result<()> {
    let mut blobs = vec![Blob::new("application/vnd.oci.image.layer.v1.tar", layer)];
    let mut manifests = Vec::new();
    for (name, command) in images {
        let config = config(&blobs[0], command, path)?;
        let manifest = manifest(&config, &blobs[0])?;
        manifests.push(named(&manifest, name));
        blobs.extend([config, manifest]);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let mut tar = Builder::new(file);
    append(
        &mut tar,
        "oci-layout",
        br#"{"imageLayoutVersion":"1.0.0"}"#,
        0o644,
    )?;
    append(&mut tar, "index.json", index.to_string().as_bytes(), 0o644)?;
    for blob in &blobs {
        append(
            &mut tar,
            &format!("blobs/sha256/{}", blob.hash),
            &blob.bytes,
            0o644,
        )?;
    }
    tar.into_inner()
        .and_then(|mut file| file.flush())
        .with_context(|| format!("write {}", archive.display()))
}

/// Writes the layer alone, which is what `docker import` takes.
pub fn write_layer(file: &Path) -> Result<()> {
    fs::write(file, layer(&busybox()?)?).with_context(|| format!("write {}", file.display()))
}

/// Lays the image's files out in a folder.
pub fn lay_out(folder: &Path) -> Result<()> {
    let archive = layer(&busybox()?)?;
    tar::Archive::new(archive.as_slice())
        .unpack(folder)
        .with_context(|| format!("fill {}", folder.display()))
}

struct Blob {
    media_type: &'static str,
    hash: String,
    bytes: Vec<u8>,
}

impl Blob {
    fn new(media_type: &'static str, bytes: Vec<u8>) -> Self {
        let hash = Sha256::digest(&bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Self {
            media_type,
            hash,
            bytes,
        }
    }

    fn digest(&self) -> String {
        format!("sha256:{}", self.hash)
    }

    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest(), "size": self.bytes.len()})
    }
}

fn config(layer: &Blob, command: &Value, path: &str) -> Result<Blob> {
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        "x86_64" => "amd64",
        other => other,
    };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": {"Cmd": command, "Env": [format!("PATH={path}")]},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest()]},
    });
    Ok(Blob::new(
        "application/vnd.oci.image.config.v1+json",
        serde_json::to_vec(&config)?,
    ))
}

fn manifest(config: &Blob, layer: &Blob) -> Result<Blob> {
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type, "config": config.descriptor(), "layers": [layer.descriptor()],
    });
    Ok(Blob::new(media_type, serde_json::to_vec(&manifest)?))
}

fn named(manifest: &Blob, name: &str) -> Value {
    let mut descriptor = manifest.descriptor();
    descriptor["annotations"] = json!({"io.containerd.image.name": name});
    descriptor
}

fn layer(busybox: &Path) -> Result<Vec<u8>> {
    let program = fs::read(busybox).with_context(|| format!("read {}", busybox.display()))?;
    let mut tar = Builder::new(Vec::new());
    for folder in FOLDERS {
        let mut header = header(EntryType::Directory, 0, 0o755);
        tar.append_data(&mut header, folder, std::io::empty())?;
    }
    append(&mut tar, "bin/busybox", &program, 0o755)?;
    for applet in APPLETS {
        let mut header = header(EntryType::Symlink, 0, 0o777);
        tar.append_link(&mut header, format!("bin/{applet}"), "busybox")?;
    }
    tar.into_inner().context("write the layer")
}

fn append<W: Write>(tar: &mut Builder<W>, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
    let mut header = header(EntryType::Regular, bytes.len() as u64, mode);
    tar.append_data(&mut header, path, bytes)
        .with_context(|| format!("append {path} to an archive"))
}

fn header(kind: EntryType, size: u64, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header
}

pub fn busybox() -> Result<PathBuf> {
    let places = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
    places
        .into_iter()
        .find(|place| place.is_file())
        .context("find busybox (integration/matrix/setup.sh installs busybox-static)")
}
