//! The agent's events, as objects of the API server.
//!
//! In a pod the credentials are those of its service account, else those of a kubeconfig. The agent
//! writes events and patches its own pod. It watches nothing, and reads a pod only for kubediag's
//! processors.

mod event_object;
mod start;

pub use self::start::start;
