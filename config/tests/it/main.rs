//! `config.toml`, and the chart and manifests as Kubernetes reads them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod agent_chart;
mod api_rights;
mod chart;
mod chart_for_policies;
mod config_toml;
mod dashboard;
mod helm;
mod kube;
mod kubectl_package;
mod kubediag;
mod manifests;
mod mistakes;
mod release_files;
