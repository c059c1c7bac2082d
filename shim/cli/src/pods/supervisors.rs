//! Checks whether the guard runs before the creates of a container, from the programs that
//! supervise containers now.
//!
//! containerd keeps the shim of a pod's sandbox for all containers of the pod, even after a change
//! of its config. So the running process decides, not the config. A conmon without the wrapper
//! proves nothing: CRI-O and Podman may call the guard through a hook.

use std::collections::HashMap;
use std::path::Path;

use bindguard_core::program_names::{SHIM, WRAPPER};
use bindguard_operator::node::arguments_of_processes;

/// The kernel cuts the names of all of containerd's shims to this.
const SHIMS: &str = "containerd-shim";

const CONMON: &str = "conmon";

/// The ids that supervisors were started for (containerd: the id of the pod's sandbox), and whether
/// the guard runs there.
pub fn guarded() -> HashMap<String, bool> {
    let shims = arguments_of_processes(SHIMS)
        .into_iter()
        .filter_map(|words| of_shim(&words));
    let conmons = arguments_of_processes(CONMON)
        .into_iter()
        .filter_map(|words| of_conmon(&words));
    shims.chain(conmons).collect()
}

/// True if a runtime's path or name is that of the wrapper.
pub fn is_wrapper(runtime: &str) -> bool {
    is_named(runtime, WRAPPER)
}

fn of_shim(words: &[String]) -> Option<(String, bool)> {
    Some((
        value(words, &["-id", "--id"])?,
        is_named(words.first()?, SHIM),
    ))
}

fn of_conmon(words: &[String]) -> Option<(String, bool)> {
    let id = value(words, &["-c", "--cid"])?;
    is_wrapper(&value(words, &["-r", "--runtime"])?).then_some((id, true))
}

fn is_named(path: &str, name: &str) -> bool {
    Path::new(path).file_name().is_some_and(|file| file == name)
}

fn value(words: &[String], flags: &[&str]) -> Option<String> {
    let at = words
        .iter()
        .position(|word| flags.contains(&word.as_str()))?;
    words.get(at + 1).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_shim_says_by_its_name_whether_it_calls_the_guard() {
        let of = |name: &str| {
            of_shim(&words(&format!(
                "/usr/bin/{name} -namespace k8s.io -id s-1 -address /run/c.sock"
            )))
        };
        assert_eq!(
            of("containerd-shim-bindguard-v2"),
            Some(("s-1".to_owned(), true))
        );
        assert_eq!(
            of("containerd-shim-runc-v2"),
            Some(("s-1".to_owned(), false))
        );
    }

    #[test]
    fn a_conmon_proves_only_the_wrapper() {
        let of = |runtime: &str| {
            of_conmon(&words(&format!(
                "/usr/bin/conmon -b /b -c c-1 -r {runtime} --syslog"
            )))
        };
        assert_eq!(
            of("/usr/local/bin/bindguard-runtime"),
            Some(("c-1".to_owned(), true))
        );
        assert_eq!(of("/usr/bin/crun"), None);
    }
}
