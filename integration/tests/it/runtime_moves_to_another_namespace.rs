//! containerd starts again in a new mount namespace, as a unit with `PrivateTmp=` does. An agent in
//! the old namespace would work on mounts that no new container gets.

use bindguard_integration::agent::Form;
use bindguard_integration::node::AGENT_LOG;
use bindguard_integration::prelude::*;

const CONFIG: &str = "agent.survey-seconds = 1";

#[test]
fn the_agent_of_a_pod_ends() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let agent = Agent::start_as(node, CONFIG, Form::Pod)?;
        surveys(&agent)?;
        node.restart_containerd(Signal::SIGTERM)?;
        surveys(&agent)?;
        node.restart_containerd_in_a_new_namespace()?;
        agent.ends_with_an_error()?;
        let log = fs::read_to_string(node.disk().join(AGENT_LOG))?;
        ensure!(log.contains("another mount namespace"), "{log}");
        surveys(&Agent::start_as(node, CONFIG, Form::Pod)?)
    });
}

#[test]
fn the_agent_of_a_service_stays() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let agent = Agent::start_as(node, CONFIG, Form::Service)?;
        surveys(&agent)?;
        node.restart_containerd_in_a_new_namespace()?;
        surveys(&agent)
    });
}

/// Waits until two more surveys have ended, the last of which queried the CRI of this moment.
fn surveys(agent: &Agent) -> Result<()> {
    let done = || agent.figure("bindguard_agent_surveys_total");
    let before = done();
    until("the agent surveys the node twice", || {
        Ok(done() >= before + 2.0)
    })
}
