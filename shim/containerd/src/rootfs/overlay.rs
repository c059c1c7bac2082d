//! Overlays with very many layers.
//!
//! mount(2) takes one page of options. An image of some sixty layers has more, all below one directory of the snapshotter;
//! so the lower directories are named relative to that directory and the mount is made from within it. The working
//! directory belongs to the whole process, hence unshare(CLONE_FS) first: this runs on a thread of its own that ends with it.

use std::{
    io,
    path::{Path, PathBuf},
};

use containerd_shim_protos::types::mount::Mount;
use nix::sched::{CloneFlags, unshare};

use super::{call, mount_options::MountOptions};

/// One page, less the final NUL and some room for what the kernel adds.
const LONGEST: usize = 4096 - 512;

/// mount(2), by way of shortened options where they are too long.
pub(super) fn mount_maybe_long(mount: &Mount, target: &Path, options: &MountOptions) -> io::Result<()> {
    let mut data = options.data.join(",");
    if mount.type_ == "overlay"
        && data.len() > LONGEST
        && let Some((directory, short)) = shorten(&options.data)
    {
        unshare(CloneFlags::CLONE_FS)?;
        std::env::set_current_dir(directory)?;
        data = short.join(",");
    }
    call(Some(&mount.source), target, Some(&mount.type_), options.flags, Some(&data))
}

/// The lower directories' common parent, and the options with names relative to it.
fn shorten(data: &[String]) -> Option<(PathBuf, Vec<String>)> {
    let lower = data.iter().find_map(|word| word.strip_prefix("lowerdir="))?;
    let layers: Vec<&Path> = lower.split(':').map(Path::new).collect();
    let parent = common_parent(&layers)?;
    let relative: Option<Vec<&str>> = layers.iter().map(|layer| layer.strip_prefix(&parent).ok()?.to_str()).collect();
    let lower = format!("lowerdir={}", relative?.join(":"));
    let replace = |word: &String| if word.starts_with("lowerdir=") { lower.clone() } else { word.clone() };
    Some((parent, data.iter().map(replace).collect()))
}

fn common_parent(paths: &[&Path]) -> Option<PathBuf> {
    let mut parent = paths.first()?.parent()?.to_owned();
    while !paths.iter().all(|path| path.starts_with(&parent) && *path != parent) {
        parent = parent.parent()?.to_owned();
    }
    (parent != Path::new("/") && parent.is_absolute()).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn layers_become_relative_and_the_rest_stays() {
        let (directory, short) =
            shorten(&words("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=/s/12/fs:/s/3/fs,index=off")).unwrap();
        assert_eq!(directory, Path::new("/s"));
        assert_eq!(short, words("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=12/fs:3/fs,index=off"));
    }

    #[test]
    fn without_a_common_directory_nothing_is_shortened() {
        assert_eq!(shorten(&words("lowerdir=/a/fs:/b/fs")), None);
        assert_eq!(shorten(&words("upperdir=/a")), None);
        assert_eq!(shorten(&words("lowerdir=/a/b:/a")), None);
    }
}
