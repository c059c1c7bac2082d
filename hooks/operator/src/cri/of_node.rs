//! Questions to the CRIs of this node, each within the time of an operator at a terminal.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::timeout;

use super::{ContainerInfo, Cri, CriError};
use crate::pods::Pods;

/// The sockets of CRIs: containerd, k3s, k0s, MicroK8s, CRI-O, cri-dockerd.
const SOCKETS: [&str; 6] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
];
/// The time limit: names are not worth more of an operator's time.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Every sandbox and container that the CRI knows; none where there is no CRI.
pub fn pods(socket: Option<&Path>) -> Result<Pods> {
    let pods = first_cri(socket, |socket| query(socket, async |cri| cri.pods().await))?;
    Ok(pods.unwrap_or_default())
}

/// The runtime's own facts about a container; none where there is no CRI.
pub fn info_of(socket: Option<&Path>, container: &str) -> Result<ContainerInfo> {
    let info = first_cri(socket, |socket| {
        query(socket, async |cri| cri.container_info(container).await)
    })?;
    Ok(info.flatten().unwrap_or_default())
}

/// The sources of all writable mounts of a pod's containers in any state.
///
/// # Errors
/// If there is no CRI, or if the CRI does not answer.
pub fn writable_mounts(socket: Option<&Path>, uid: &str) -> Result<Vec<PathBuf>> {
    let mounts = first_cri(socket, |socket| {
        query(socket, async |cri| cri.writable_mounts(uid).await)
    })?;
    mounts.context("this node has no CRI; give --cri SOCKET")
}

/// The answer of the named socket, or of the first usual socket whose server has a CRI; `None`
/// without a socket. Docker's containerd has no CRI, and can run beside CRI-O.
fn first_cri<A>(named: Option<&Path>, query: impl Fn(&Path) -> Result<A>) -> Result<Option<A>> {
    let mut sockets = Vec::from_iter(named);
    if named.is_none() {
        sockets.extend(SOCKETS.map(Path::new));
        sockets.retain(|socket| socket.symlink_metadata().is_ok());
    }
    let mut without_cri = None;
    for socket in sockets {
        match query(socket) {
            Err(error) if is_unimplemented(&error) => without_cri = without_cri.or(Some(error)),
            answer => return answer.map(Some),
        }
    }
    without_cri.map_or(Ok(None), Err)
}

/// True if the server of a socket has no CRI.
pub fn is_unimplemented(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<CriError>()
        .is_some_and(CriError::is_unimplemented)
}

/// The answer to the calls that `calls` makes.
///
/// # Errors
/// If the socket has no server, or if the calls take too long or fail.
pub fn query<A>(socket: &Path, calls: impl AsyncFnOnce(Cri) -> Result<A, CriError>) -> Result<A> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("make a tokio runtime")?;
    let calls = async { calls(Cri::connect(socket, CALL_TIMEOUT).await?).await };
    // the timer needs the runtime when it is made
    let answer = runtime.block_on(async { timeout(CALL_TIMEOUT, calls).await });
    answer
        .map_err(|_| anyhow::anyhow!("it does not answer within {} s", CALL_TIMEOUT.as_secs()))
        .and_then(|answer| Ok(answer?))
        .with_context(|| format!("query {}", socket.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_socket_is_an_error_only_when_it_was_named() {
        let error = pods(Some(Path::new("/nowhere.sock"))).unwrap_err();
        assert!(
            format!("{error:#}").starts_with("query /nowhere.sock: connect: "),
            "{error:#}"
        );
    }
}
