//! The wrapper between ttrpc and every method.
//!
//! ttrpc drops a method's future when its client disconnects or its deadline passes. If a `create`
//! is dropped between the runtime's run and its record, the container is unknown to the shim. So a
//! method that changes something runs to its end in a separate task. A method that panics would
//! never answer: the panic is caught and answered as INTERNAL, and the pod's other containers live
//! on.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;

use super::calls::PendingCall;
use super::refusal::Refusal;

/// Makes a method panic for the container that is named after it, in a build with fault points.
#[cfg(feature = "fault-points")]
pub(super) fn panic_on_request(method: &str, id: &str) {
    assert!(
        id.strip_prefix(bindguard_core::fault_points::PANIC_IN) != Some(method),
        "a fault point"
    );
}

/// This build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub(super) fn panic_on_request(_: &str, _: &str) {}

/// Runs a method that changes something to its end, even if the client disconnects.
pub(super) async fn run_to_end<T: Send + 'static>(
    call: PendingCall,
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> ttrpc::Result<T> {
    let method = call.method();
    let work = async move {
        let _pending = call;
        work.await
    };
    match tokio::spawn(work).await {
        Ok(result) => result.map_err(|refusal| refusal.logged(method).into()),
        Err(_panicked) => Err(Refusal::panicked(method).into()),
    }
}

/// Runs a method that only reads. The future may be dropped at any time.
pub(super) async fn run_cancellable<T>(
    call: PendingCall,
    work: impl Future<Output = Result<T, Refusal>> + Send,
) -> ttrpc::Result<T> {
    let method = call.method();
    let mut work = pin!(work);
    let caught = std::future::poll_fn(|context| {
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(Err(Refusal::panicked(method))))
    });
    caught.await.map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;
    use crate::service::calls::Calls;

    fn call() -> PendingCall {
        Arc::new(Calls::default()).begin("x", "web", "")
    }

    fn code(result: ttrpc::Result<()>) -> ttrpc::Code {
        match result {
            Err(ttrpc::Error::RpcStatus(status)) => status.code(),
            other => panic!("no status: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_panic_is_answered() {
        assert_eq!(
            code(run_to_end(call(), async { panic!("no") }).await),
            ttrpc::Code::INTERNAL
        );
        assert_eq!(
            code(run_cancellable(call(), async { panic!("no") }).await),
            ttrpc::Code::INTERNAL
        );
    }

    #[tokio::test]
    async fn a_change_is_finished_after_the_client_disconnects() {
        let (go_on, resumed) = oneshot::channel();
        let (done, seen) = oneshot::channel();
        let work = run_to_end(call(), async move {
            resumed.await.unwrap();
            done.send(()).unwrap();
            Ok(())
        });
        assert!(timeout(Duration::from_millis(5), work).await.is_err());
        go_on.send(()).unwrap();
        timeout(Duration::from_secs(60), seen)
            .await
            .unwrap()
            .unwrap();
    }
}
