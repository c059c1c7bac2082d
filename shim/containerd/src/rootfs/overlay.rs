//! Overlays with very many layers.
//!
//! mount(2) takes a page of options. An image of about sixty layers needs more, with all layers
//! below a directory of the snapshotter. So the lower directories are named relative to this
//! directory, which is the working directory of mount(2). All threads share the working directory,
//! hence unshare(CLONE_FS) first, on a thread that ends after the mount.

use std::io;
use std::path::{Path, PathBuf};

use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};

use super::call;

/// A page, less the final NUL. mount(2) silently cuts a longer string.
const MAX_OPTIONS: usize = 4096 - 1;
const LOWER: &str = "lowerdir=";

/// mount(2), with shortened options if they are too long.
pub(super) fn mount_with_long_options(
    kind: &str,
    source: &Path,
    flags: MsFlags,
    options: &[String],
    target: &Path,
) -> io::Result<()> {
    let mut data = options.join(",");
    if kind == "overlay"
        && data.len() > MAX_OPTIONS
        && let Some((directory, short)) = shorten(options)
    {
        unshare(CloneFlags::CLONE_FS)?;
        std::env::set_current_dir(directory)?;
        data = short.join(",");
    }
    if data.len() > MAX_OPTIONS {
        return Err(io::Error::new(
            io::ErrorKind::ArgumentListTooLong,
            "more options than mount(2) takes",
        ));
    }
    call(Some(source), target, Some(kind), flags, Some(&data))
}

/// The lower directories' common parent, and the options with names relative to it.
fn shorten(options: &[String]) -> Option<(PathBuf, Vec<String>)> {
    let layers = lower_directories(options)?;
    let parent = common_parent(&layers)?;
    let relative: Option<Vec<&str>> = layers
        .iter()
        .map(|layer| layer.strip_prefix(&parent).ok()?.to_str())
        .collect();
    let short = with_lower(options, &relative?.join(":"));
    Some((parent, short))
}

/// The lower directories in an overlay's options.
pub(super) fn lower_directories(options: &[String]) -> Option<Vec<&Path>> {
    let lower = options.iter().find_map(|word| word.strip_prefix(LOWER))?;
    Some(lower.split(':').map(Path::new).collect())
}

/// The options with other lower directories.
pub(super) fn with_lower(options: &[String], lower: &str) -> Vec<String> {
    let replace = |word: &String| match word.starts_with(LOWER) {
        true => format!("{LOWER}{lower}"),
        false => word.clone(),
    };
    options.iter().map(replace).collect()
}

/// The lowest directory above all paths; `None` for `/`.
pub(super) fn common_parent(paths: &[&Path]) -> Option<PathBuf> {
    let mut parent = paths.first()?.parent()?.to_owned();
    while !paths
        .iter()
        .all(|path| path.starts_with(&parent) && *path != parent)
    {
        parent = parent.parent()?.to_owned();
    }
    (parent != Path::new("/") && parent.is_absolute()).then_some(parent)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn layers_become_relative_and_the_rest_stays() {
        let (directory, short) = shorten(&words(
            "workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=/s/12/fs:/s/3/fs,index=off",
        ))
        .unwrap();
        assert_eq!(directory, Path::new("/s"));
        assert_eq!(
            short,
            words("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=12/fs:3/fs,index=off")
        );
    }

    #[test]
    fn without_a_common_directory_nothing_is_shortened() {
        assert_eq!(shorten(&words("lowerdir=/a/fs:/b/fs")), None);
        assert_eq!(shorten(&words("upperdir=/a")), None);
        assert_eq!(shorten(&words("lowerdir=/a/b:/a")), None);
    }

    /// In a mount namespace of its own thread.
    fn mount_hundred_layers(dir: &Path) -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        call(
            None,
            Path::new("/"),
            None,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None,
        )?;
        call(
            Some(Path::new("layers")),
            dir,
            Some("tmpfs"),
            MsFlags::empty(),
            None,
        )?;
        let layers: Vec<PathBuf> = (0..100)
            .map(|n| dir.join(format!("{n:0>30}")).join("fs"))
            .collect();
        for (n, layer) in layers.iter().enumerate() {
            fs::create_dir_all(layer)?;
            fs::write(layer.join(format!("from-{n}")), "")?;
        }
        let [upper, work, merged] = ["upper", "work", "merged"].map(|name| dir.join(name));
        for directory in [&upper, &work, &merged] {
            fs::create_dir(directory)?;
        }
        let lower: Vec<_> = layers
            .iter()
            .map(|layer| layer.display().to_string())
            .collect();
        let words = [
            format!("workdir={}", work.display()),
            format!("upperdir={}", upper.display()),
            format!("lowerdir={}", lower.join(":")),
        ];
        let source = Path::new("overlay");
        mount_with_long_options("overlay", source, MsFlags::empty(), &words, &merged)?;
        fs::metadata(merged.join("from-0"))
            .and(fs::metadata(merged.join("from-99")))
            .map(drop)
    }

    #[test]
    fn a_hundred_layers_are_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let here = std::env::current_dir().unwrap();
        let path = dir.path().to_owned();
        match std::thread::spawn(move || mount_hundred_layers(&path))
            .join()
            .unwrap()
        {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                eprintln!("SKIPPED: no right to mount")
            }
            result => result.unwrap(),
        }
        assert_eq!(std::env::current_dir().unwrap(), here);
    }
}
