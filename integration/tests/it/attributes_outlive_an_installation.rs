//! Issues 25 and 26: an edited file keeps its mode, owner and extended attributes, and a file that
//! was replaced comes back with its times, too.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags, getxattr, setxattr, utimensat};

const XATTR: &str = "user.origin";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let config = node.disk().join("config.toml");
        let program = PathBuf::from("/usr/local/bin/bindguard-runtime");
        with_attributes(&config, "version = 3\n", 0o640)?;
        with_attributes(&program, "#!/bin/sh\necho mine\n", 0o751)?;
        let before = [seen(&config)?, seen(&program)?];
        install(node, &config)?.success()?;
        let edited = seen(&config)?;
        ensure!(edited.text != before[0].text, "nothing was edited");
        let kept = (edited.mode, edited.owner, &edited.xattr);
        ensure!(
            kept == (before[0].mode, before[0].owner, &before[0].xattr),
            "after an edit: {edited:?}"
        );
        ensure!(
            program.symlink_metadata()?.is_symlink(),
            "the program was not replaced"
        );
        node.bindguard(["uninstall", "--restart"])?.success()?;
        let after = [seen(&config)?, seen(&program)?];
        ensure!(after == before, "before: {before:?}, after: {after:?}");
        an_edit_between_two_installs(node, &config)
    });
}

/// The operator's edit comes back with the attributes that the operator gave it.
fn an_edit_between_two_installs(node: &Node, config: &Path) -> Result<()> {
    install(node, config)?.success()?;
    let edited = fs::read_to_string(config)?.replace("version = 3", "version = 3 # mine");
    with_attributes(config, &edited, 0o600)?;
    let file = config.display().to_string();
    node.bindguard(["install", "--default", "--containerd-config", &file])?
        .success()?;
    node.bindguard(["uninstall", "--restart"])?.success()?;
    let after = seen(config)?;
    ensure!(
        (after.mode & 0o7777, after.text.as_str()) == (0o600, "version = 3 # mine\n"),
        "{after:?}"
    );
    Ok(())
}

#[derive(Debug, PartialEq)]
struct Seen {
    text: String,
    mode: u32,
    owner: (u32, u32),
    times: (i64, i64, i64),
    xattr: Vec<u8>,
}

fn seen(path: &Path) -> Result<Seen> {
    let found = path.symlink_metadata()?;
    let mut value = [0; 64];
    let length = getxattr(path, XATTR, &mut value[..])
        .with_context(|| format!("read an attribute of {}", path.display()))?;
    Ok(Seen {
        mode: found.mode(),
        owner: (found.uid(), found.gid()),
        times: (found.mtime(), found.mtime_nsec(), found.atime()),
        xattr: value[..length].to_vec(),
        text: fs::read_to_string(path)?,
    })
}

fn with_attributes(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    chown(path, Some(12), Some(34))?;
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    setxattr(path, XATTR, b"the operator", XattrFlags::empty()).context("set an attribute")?;
    let time = |seconds| Timespec {
        tv_sec: seconds,
        tv_nsec: 5,
    };
    // A read would change an access time that is older than the modification time.
    let times = Timestamps {
        last_access: time(4_000_000_000),
        last_modification: time(1_000_000_000),
    };
    utimensat(CWD, path, &times, AtFlags::empty()).context("set the times")
}

fn install(node: &Node, config: &Path) -> Result<Finished> {
    node.bindguard([
        "install",
        "--containerd-config",
        &config.display().to_string(),
    ])
}
