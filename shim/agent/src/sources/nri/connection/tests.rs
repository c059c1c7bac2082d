//! A plugin beside a runtime that sends valid and invalid messages.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::os::unix::net::UnixListener;
use std::thread;

use prost::bytes::Bytes;

use super::*;
use crate::sinks::metrics::Metrics;
use crate::sources::nri::messages::{NriContainer, NriMount};
use crate::work::Node;

/// The runtime's end of a connection.
struct FakeRuntime {
    stream: UnixStream,
    metrics: &'static Metrics,
}

impl FakeRuntime {
    fn send(&mut self, connection: u32, message: &Message) {
        write_frames(&mut self.stream, connection, &message.to_bytes()).unwrap();
    }

    fn receive(&mut self, connection: u32) -> Message {
        let mut incoming = Incoming::default();
        loop {
            let frame = read_frame(&mut self.stream).unwrap().unwrap();
            assert_eq!(frame.connection, connection);
            incoming.push(&frame.payload);
            if let Some(message) = incoming.next_message().unwrap() {
                return message;
            }
        }
    }

    fn call(&mut self, method: &str, payload: Vec<u8>) -> Response {
        let call = Request {
            service: PLUGIN.to_owned(),
            method: method.to_owned(),
            payload: payload.into(),
        };
        self.send(TO_PLUGIN, &Message::Request(5, call));
        let Message::Response(5, response) = self.receive(TO_PLUGIN) else {
            panic!("no answer to {method}")
        };
        response
    }
}

/// Runs a plugin beside a runtime that does this after the registration.
fn beside(runtime: impl FnOnce(&mut FakeRuntime)) -> Result<()> {
    beside_with("", runtime)
}

/// The same, with this config.
fn beside_with(config: &str, runtime: impl FnOnce(&mut FakeRuntime)) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let node = Node::silent(config);
    let calls = Calls::new(node);
    let plugin = thread::spawn(move || Connection::register(&socket, &calls)?.serve());
    let mut fake = FakeRuntime {
        stream: listener.accept().unwrap().0,
        metrics: node.metrics,
    };
    let Message::Request(1, call) = fake.receive(TO_RUNTIME) else {
        panic!("no registration")
    };
    assert_eq!(
        (call.service.as_str(), call.method.as_str()),
        (RUNTIME, "RegisterPlugin")
    );
    let plugin_of = RegisterPluginRequest::decode(call.payload).unwrap();
    assert_eq!(plugin_of.nri_version, "v0.12.0");
    runtime(&mut fake);
    drop(fake);
    plugin.join().unwrap()
}

#[test]
fn a_list_in_parts_is_acknowledged_part_by_part() {
    let ended = beside(|runtime| {
        runtime.send(TO_RUNTIME, &Message::Response(1, Response::default()));
        let configured = runtime.call("Configure", Vec::new()).payload;
        assert_eq!(
            ConfigureResponse::decode(configured.as_slice())
                .unwrap()
                .events,
            CREATE_CONTAINER | START_CONTAINER
        );
        for more in [true, true, false] {
            let part = SynchronizeRequest {
                containers: vec![(); 3],
                more,
            };
            let answer = runtime.call("Synchronize", part.encode_to_vec()).payload;
            assert_eq!(
                SynchronizeResponse::decode(answer.as_slice()).unwrap().more,
                more
            );
            assert_eq!(
                runtime.metrics[Level::NriConnected].get(),
                i64::from(!more),
                "a part of the list is not the end"
            );
        }
    });
    assert!(ended.is_ok(), "{ended:?}");
}

#[test]
fn a_request_that_cannot_be_read_changes_nothing_and_the_next_one_is_answered() {
    let ended = beside(|runtime| {
        assert_eq!(
            runtime.call("CreateContainer", vec![0xff; 20]),
            Response::default()
        );
        assert_eq!(
            runtime.call("StopContainer", Vec::new()),
            Response::default()
        );
        assert_eq!(
            runtime.call("Unheard", Vec::new()).status.unwrap().code,
            RpcStatus::UNIMPLEMENTED
        );
        assert_eq!(
            runtime.call("CreateContainer", Vec::new()),
            Response::default()
        );
        let figures = runtime.metrics.text().unwrap();
        for line in [
            "{answer=\"failed\"} 1",
            "{answer=\"unchanged\"} 1",
            "{answer=\"timed_out\"} 0",
        ] {
            assert!(
                figures.contains(&format!("bindguard_nri_creates_total{line}")),
                "{line} is not in\n{figures}"
            );
        }
    });
    assert!(ended.is_ok(), "{ended:?}");
}

/// An error, or a late answer, would keep the container from its start.
#[test]
fn a_start_is_always_answered() {
    let ended = beside(|runtime| {
        let created = StateChangeEvent {
            event: 5,
            container: None,
        };
        let started = StateChangeEvent {
            event: START_CONTAINER_EVENT,
            container: Some(CreatedContainer {
                pod_sandbox_id: String::new(),
                id: "no-such-container".to_owned(),
                pid: 0,
            }),
        };
        let dedicated = StartContainerRequest {
            container: started.container.clone(),
        };
        for (method, payload) in [
            ("StateChange", vec![0xff; 20]),
            ("StateChange", created.encode_to_vec()),
            ("StateChange", started.encode_to_vec()),
            ("StartContainer", vec![0xff; 20]),
            ("StartContainer", dedicated.encode_to_vec()),
        ] {
            assert_eq!(runtime.call(method, payload), Response::default());
        }
        let figures = runtime.metrics.text().unwrap();
        for line in ["{answer=\"failed\"} 2", "{answer=\"current\"} 2"] {
            assert!(
                figures.contains(&format!("bindguard_nri_starts_total{line}")),
                "{line} is not in\n{figures}"
            );
        }
    });
    assert!(ended.is_ok(), "{ended:?}");
}

/// A policy that refuses a fault refuses mounts that may have it.
#[test]
fn mounts_that_were_not_checked_are_refused_only_by_policy() {
    let create = |mounts: usize, bytes: &[u8]| {
        let container = NriContainer {
            id: "c-1".to_owned(),
            mounts: vec![Bytes::copy_from_slice(bytes); mounts],
            ..NriContainer::default()
        };
        let request = CreateContainerRequest {
            container: Some(container),
            ..CreateContainerRequest::default()
        };
        request.encode_to_vec()
    };
    let mount = NriMount {
        destination: "/a".to_owned(),
        r#type: "tmpfs".to_owned(),
        ..NriMount::default()
    };
    let mount = mount.encode_to_vec();
    let (few, many) = (create(2_000, &mount), create(2_001, &mount));
    let unreadable = [create(1, &[0xff; 20]), vec![0xff; 20]];
    let ended = beside(|runtime| {
        for payload in [&many, &unreadable[0], &unreadable[1]] {
            assert_eq!(
                runtime.call("CreateContainer", payload.clone()),
                Response::default()
            );
        }
    });
    assert!(ended.is_ok(), "{ended:?}");
    let ended = beside_with("checks.unmounted-volumes = 'refuse'", |runtime| {
        assert_eq!(
            runtime.call("CreateContainer", few.clone()),
            Response::default()
        );
        for (payload, why) in [
            (&many, "1 mounts behind the first 2000 were not checked"),
            (&unreadable[0], "could not check the mounts"),
            (&unreadable[1], "could not check the mounts"),
        ] {
            let status = runtime.call("CreateContainer", payload.clone()).status;
            let status = status.unwrap();
            assert_eq!(status.code, RpcStatus::FAILED_PRECONDITION);
            assert!(status.message.contains(why), "{}", status.message);
        }
        let figures = runtime.metrics.text().unwrap();
        let refused = "bindguard_nri_creates_total{answer=\"refused\"} 3\n";
        assert!(figures.contains(refused), "{figures}");
    });
    assert!(ended.is_ok(), "{ended:?}");
    let ended = beside_with("checks.proof = 'refuse'", |runtime| {
        let status = runtime.call("StartContainer", vec![0xff; 20]).status;
        assert_eq!(status.unwrap().code, RpcStatus::FAILED_PRECONDITION);
    });
    assert!(ended.is_ok(), "{ended:?}");
}

#[test]
fn a_refused_registration_and_bytes_that_are_no_message_end_the_connection() {
    let refused = beside(|runtime| {
        let status = Some(RpcStatus {
            code: 2,
            message: "no such index".to_owned(),
        });
        runtime.send(
            TO_RUNTIME,
            &Message::Response(
                1,
                Response {
                    status,
                    ..Response::default()
                },
            ),
        );
    });
    assert_eq!(refused.unwrap_err().to_string(), "register: no such index");
    let garbage =
        beside(|runtime| write_frames(&mut runtime.stream, TO_PLUGIN, &[0xff; 20]).unwrap());
    let garbage = garbage.unwrap_err().to_string();
    assert_eq!(garbage, "read a message of the runtime");
}
