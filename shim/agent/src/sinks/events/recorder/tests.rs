//! The requests of the recorder to the API server, with a clock that the test moves.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::sync::Mutex;

use bindguard_config::{EventMode, RefreshMode};
use bindguard_core::identity::PodName;

use super::*;
use crate::sinks::Reporting;
use crate::sinks::events::Reason;

/// An API server that counts, and answers as the test requires.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    requests: Vec<(Instant, Event)>,
    disconnects: Vec<Instant>,
    fails: bool,
    hangs: bool,
    forgets: bool,
}

impl EventApi for Server {
    async fn write(&mut self, event: &Event) -> Result<u32, EventWriteError> {
        let hangs = {
            let mut seen = self.0.lock().unwrap();
            seen.requests.push((Instant::now(), event.clone()));
            if seen.forgets && event.exists {
                return Err(EventWriteError::Gone);
            }
            if seen.fails {
                return Err(EventWriteError::Unavailable {
                    why: "down".to_owned(),
                    pause: None,
                });
            }
            seen.hangs
        };
        if hangs {
            sleep(Duration::from_secs(10)).await;
            return Err(EventWriteError::Unavailable {
                why: "silent".to_owned(),
                pause: None,
            });
        }
        Ok(event.count)
    }

    fn disconnect(&mut self) {
        self.set(|seen| seen.disconnects.push(Instant::now()));
    }
}

impl Server {
    fn requests(&self) -> Vec<(Instant, Event)> {
        self.0.lock().unwrap().requests.clone()
    }

    fn set(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.0.lock().unwrap());
    }
}

fn start(server: &Server, per_minute: u32) -> (Reporting, &'static Metrics) {
    let metrics = Metrics::new();
    (start_node(server, per_minute, metrics), metrics)
}

fn start_node(server: &Server, per_minute: u32, metrics: &'static Metrics) -> Reporting {
    let (recorder, occurrences) = channel(WAITING);
    let mut reporting = Reporting::off(metrics);
    reporting.events_to(EventMode::All, recorder);
    let pods = PodLookup::new("/nowhere.sock".as_ref(), None, RefreshMode::Off);
    tokio::spawn(Recorder::new(server.clone(), pods, per_minute, metrics).run(occurrences));
    reporting
}

fn repaired(pod: usize, message: &str) -> Occurrence {
    let pod = PodName {
        namespace: Some("n".to_owned()),
        name: Some(format!("p-{pod}")),
        uid: Some(format!("u-{pod}")),
    };
    Occurrence {
        pod,
        container: None,
        reason: Reason::BindMountRepaired,
        message: message.to_owned(),
    }
}

async fn pass(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

fn figure(metrics: &Metrics, name: &str) -> u64 {
    let text = metrics.text().unwrap();
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn repeated_occurrences_are_created_once_and_then_counted() {
    let server = Server::default();
    let (events, metrics) = start(&server, 60);
    events.record((0..3).map(|_| repaired(0, "a")));
    pass(5).await;
    events.record([repaired(0, "a")]);
    pass(5).await;
    let seen: Vec<_> = server
        .requests()
        .into_iter()
        .map(|(_, event)| (event.count, event.exists))
        .collect();
    assert_eq!(seen, [(3, false), (4, true)]);
    assert_eq!(
        figure(metrics, "bindguard_events_total{result=\"written\"}"),
        2
    );
}

#[tokio::test(start_paused = true)]
async fn an_event_that_the_server_forgot_is_created_again() {
    let server = Server::default();
    let (events, _) = start(&server, 60);
    events.record([repaired(0, "a")]);
    pass(5).await;
    server.set(|seen| seen.forgets = true);
    events.record([repaired(0, "a")]);
    pass(5).await;
    let seen: Vec<_> = server
        .requests()
        .into_iter()
        .map(|(_, event)| (event.count, event.exists))
        .collect();
    assert_eq!(seen, [(1, false), (2, true), (2, false)]);
}

/// The connection of a burst stays until its last event is written, and 20 s longer.
#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_once() {
    let server = Server::default();
    let (events, _) = start(&server, 6);
    for bursts in 1..=2 {
        events.record((0..20).map(|pod| repaired(pod, &bursts.to_string())));
        pass(600).await;
        let (requests, disconnects) = (
            server.requests(),
            server.0.lock().unwrap().disconnects.clone(),
        );
        assert_eq!((requests.len(), disconnects.len()), (20 * bursts, bursts));
        assert_eq!(
            disconnects[bursts - 1] - requests[20 * bursts - 1].0,
            IDLE_TIMEOUT
        );
    }
}

/// An API server that is down for an hour, or hangs, costs few requests. Afterwards it gets the
/// newest state, with every occurrence counted.
#[tokio::test(start_paused = true)]
async fn an_hour_without_an_api_server() {
    for hangs in [false, true] {
        let server = Server::default();
        server.set(|seen| (seen.fails, seen.hangs) = (!hangs, hangs));
        let (events, metrics) = start(&server, 6);
        for minute in 0..60 {
            events.record((0..100).map(|pod| repaired(pod, &minute.to_string())));
            pass(60).await;
        }
        let during = server.requests().len();
        assert!((10..40).contains(&during), "{during} requests in an hour");
        assert!(figure(metrics, "bindguard_event_request_failures_total") >= 10);
        server.set(|seen| (seen.fails, seen.hangs) = (false, false));
        pass(310).await;
        let after = server.requests();
        assert!(after.len() > during, "nothing is written afterwards");
        let (_, last) = after.last().unwrap();
        assert_eq!((last.message.as_str(), last.count), ("59", 60));
    }
}

/// Pods of which nothing new happened for ten minutes are no news when the API server is back.
#[tokio::test(start_paused = true)]
async fn old_news_is_not_written() {
    let server = Server::default();
    server.set(|seen| seen.fails = true);
    let (events, metrics) = start(&server, 6);
    events.record((0..100).map(|pod| repaired(pod, "a")));
    pass(1200).await;
    let during = server.requests().len();
    server.set(|seen| seen.fails = false);
    pass(1200).await;
    assert_eq!(server.requests().len(), during);
    let expired = figure(metrics, "bindguard_events_total{result=\"expired\"}");
    assert_eq!(expired, 100);
}

/// Every node of a large cluster has more events than it may write, at the same moment: the sum
/// stays within the bound that docs/agent.md gives.
#[tokio::test(start_paused = true)]
async fn a_storm_on_2000_nodes() {
    const NODES: usize = 2000;
    const PER_MINUTE: usize = 6;
    let server = Server::default();
    let metrics = Metrics::new();
    let nodes: Vec<_> = (0..NODES)
        .map(|_| start_node(&server, PER_MINUTE as u32, metrics))
        .collect();
    let begin = Instant::now();
    for events in &nodes {
        events.record((0..100).map(|pod| repaired(pod, "a")));
    }
    pass(600).await;
    let mut by_second = vec![0_usize; 601];
    for (time, _) in server.requests() {
        by_second[(time - begin).as_secs() as usize] += 1;
    }
    let busiest = by_second.iter().max().unwrap();
    let later: usize = by_second[300..600].iter().sum();
    let total: usize = by_second.iter().sum();
    println!(
        "busiest second: {busiest}, requests: {total}, a second after five minutes: {}",
        later / 300
    );
    assert!(*busiest <= 800, "{busiest} requests in one second");
    assert!(
        later / 300 <= NODES * PER_MINUTE / 60,
        "{} in a second later on",
        later / 300
    );
    assert!(total <= NODES * (PER_MINUTE * 10 + 1));
    assert!(total >= NODES * 60, "the nodes wait for nothing: {total}");
}
