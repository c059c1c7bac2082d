//! Addresses: the link of a group, the server's address in a bundle, and containerd's event socket.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::claim::hash;

/// The directory all of containerd's shims put their sockets in.
pub(super) const SOCKET_DIRECTORY: &str = "/run/containerd/s";
/// containerd 1.x reads this file in a bundle after a restart: it has the server's address.
pub(super) const ADDRESS_FILE: &str = "address";

/// The link to a group's server: a hash of containerd's address, namespace and group, since paths
/// of sockets are short. Go's shim binds its socket at the same path, so a start of either shim
/// finds the group's server.
pub(super) fn link_of_group(
    directory: &Path,
    containerd: &str,
    namespace: &str,
    group: &str,
) -> PathBuf {
    let key = Path::new(containerd).join(namespace).join(group);
    directory.join(hash(key.as_os_str().as_encoded_bytes()))
}

/// The address of a socket.
pub(super) fn of_socket(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

/// Writes the address into the bundle, which is the current directory.
pub(super) fn write(address: &str) -> io::Result<()> {
    crate::bundle::write_beside(Path::new(ADDRESS_FILE), address.as_bytes())
}

/// The socket that a bundle names.
pub(super) fn socket_of_bundle(bundle: &Path) -> Option<PathBuf> {
    let address = fs::read_to_string(bundle.join(ADDRESS_FILE)).ok()?;
    let address = address.trim();
    Some(address.strip_prefix("unix://").unwrap_or(address).into())
}

/// containerd's event socket: the address in the environment, else the fixed path beside
/// containerd's own socket.
pub(crate) fn of_events(containerd: &str) -> String {
    match std::env::var("TTRPC_ADDRESS") {
        Ok(address) if !address.is_empty() => address,
        _ => format!("{containerd}.ttrpc"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_has_the_name_of_gos_socket() {
        let link = |namespace| {
            link_of_group(
                Path::new(SOCKET_DIRECTORY),
                "/run/containerd/containerd.sock",
                namespace,
                "abc",
            )
        };
        // sha256("/run/containerd/containerd.sock/k8s.io/abc")
        let name =
            "/run/containerd/s/a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72";
        assert_eq!(link("k8s.io"), Path::new(name));
        assert_ne!(link("moby"), Path::new(name));
    }
}
