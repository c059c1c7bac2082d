//! Connections of a listener that anyone may reach: clients that never read or never write must not
//! block new clients.
//!
//! A connection has a time limit for each write and a limit for its whole life. When the limit of
//! connections is reached, the oldest connection is closed: the kubelet's probe is always accepted.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep, timeout};

/// Limit of connections at a time.
const MAX_CONNECTIONS: usize = 32;

/// Time limit for a write: the client reads nothing meanwhile.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a connection. A client that keeps its connection open, as Prometheus does,
/// connects again.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);

/// The pause after a failed accept: the process may have no descriptor left.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves each connection of a listener in a task of its own. It never returns.
pub async fn accept<F>(listener: TcpListener, serve: impl Fn(TimedStream<TcpStream>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut open = VecDeque::<AbortHandle>::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                open.retain(|connection| !connection.is_finished());
                if open.len() >= MAX_CONNECTIONS {
                    open.pop_front().inspect(AbortHandle::abort);
                }
                let served = timeout(CONNECTION_TIMEOUT, serve(TimedStream::new(stream)));
                open.push_back(tokio::spawn(served).abort_handle());
                // Otherwise a burst of connections could close this connection before its first
                // turn.
                tokio::task::yield_now().await;
            }
            Err(_) => sleep(ACCEPT_INTERVAL).await,
        }
    }
}

/// A stream whose writes have a time limit.
#[derive(Debug)]
pub struct TimedStream<S> {
    stream: S,
    /// Runs while a write waits for the client.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<S> TimedStream<S> {
    /// A stream that has written nothing yet.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            limit: None,
        }
    }

    fn limited<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.limit = None;
            return written;
        }
        let limit = self
            .limit
            .get_or_insert_with(|| Box::pin(sleep(WRITE_TIMEOUT)));
        limit
            .as_mut()
            .poll(context)
            .map(|()| Err(ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.limited(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limited(context, closed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Longer than a probe needs on a busy machine.
    const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

    /// Clients that send nothing, or read nothing, take all connections.
    #[tokio::test]
    async fn a_probe_is_answered_beside_clients_that_never_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(accept(listener, |mut stream| async move {
            let mut request = [0];
            let _ = stream.read_exact(&mut request).await;
            let _ = stream.write_all(b"OK").await;
        }));
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS * 2 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"?").await.unwrap();
        let mut answer = String::new();
        probe.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "OK");
        // The oldest connection was closed for a newer connection, and the newest is still open.
        assert!(matches!(silent[0].read(&mut [0]).await, Ok(0) | Err(_)));
        let newest = silent.last_mut().unwrap();
        newest.write_all(b"?").await.unwrap();
        assert_eq!(newest.read(&mut [0; 2]).await.unwrap(), 2);
    }

    /// Clients that connect without a pause. Each new connection closes the oldest connection.
    #[tokio::test]
    async fn a_probe_is_answered_beside_clients_that_connect_in_a_loop() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(accept(listener, |mut stream| async move {
            let mut request = [0];
            let _ = stream.read_exact(&mut request).await;
            let _ = stream.write_all(b"OK").await;
        }));
        let is_over = Arc::new(AtomicBool::new(false));
        let flood = || {
            let (is_over, connected) = (Arc::clone(&is_over), Arc::new(AtomicUsize::new(0)));
            let count = Arc::clone(&connected);
            let client = thread::spawn(move || {
                let mut open = VecDeque::new();
                while !is_over.load(Ordering::Relaxed) {
                    open.extend(std::net::TcpStream::connect(address));
                    count.fetch_add(1, Ordering::Relaxed);
                    if open.len() > 2 * MAX_CONNECTIONS {
                        open.pop_front();
                    }
                }
            });
            (client, connected)
        };
        let floods = [flood(), flood()];
        for (_, connected) in &floods {
            while connected.load(Ordering::Relaxed) <= 2 * MAX_CONNECTIONS {
                sleep(Duration::from_millis(1)).await;
            }
        }
        let mut answered = 0;
        for _ in 0..100 {
            let probe = async {
                let mut probe = TcpStream::connect(address).await?;
                probe.write_all(b"?").await?;
                let mut answer = String::new();
                probe.read_to_string(&mut answer).await.map(|_| answer)
            };
            let answer = timeout(PROBE_TIMEOUT, probe).await;
            answered += u32::from(matches!(answer, Ok(Ok(answer)) if answer == "OK"));
        }
        is_over.store(true, Ordering::Relaxed);
        for (client, _) in floods {
            client.join().unwrap();
        }
        // The kubelet tries a probe three times.
        assert!(answered > 90, "{answered} of 100 probes were answered");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_nobody_reads_ends() {
        let (server, client) = duplex(16);
        let mut server = TimedStream::new(server);
        let error = server.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(client);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_gets_everything() {
        let (server, mut client) = duplex(16);
        let mut server = TimedStream::new(server);
        let write = tokio::spawn(async move { server.write_all(&[0; 64]).await });
        for _ in 0..4 {
            sleep(WRITE_TIMEOUT / 2).await;
            client.read_exact(&mut [0; 16]).await.unwrap();
        }
        write.await.unwrap().unwrap();
    }
}
