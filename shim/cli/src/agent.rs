//! The node agent, by its unix socket.

use std::io;
use std::os::unix::net::UnixStream;

use bindguard_config::Config;
use bindguard_operator::agent_status::{AgentState, STATUS_PATH};

use bindguard_operator::unix_http;

/// The state of the agent. It is optional: without a socket it is absent.
pub fn state(config: &Config) -> AgentState {
    let socket = &config.agent().socket;
    match UnixStream::connect(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return AgentState::Absent,
        // The query below has the error.
        Ok(_) | Err(_) => {}
    }
    let status =
        unix_http::get(socket, STATUS_PATH).and_then(|text| Ok(serde_json::from_str(&text)?));
    match status {
        Ok(status) => AgentState::Running(Box::new(status)),
        Err(error) => AgentState::Silent {
            problem: format!("{error:#}"),
        },
    }
}
