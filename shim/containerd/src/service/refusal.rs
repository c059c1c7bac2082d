//! An error in the form for containerd: a gRPC code and a line of text.
//!
//! containerd decides by the code: NOT_FOUND to a kill means that the process has ended. containerd
//! shows the text of all other errors to the user. Each error of a task has a code here: the match
//! has no catch-all arm.

use bindguard_core::error_chain;
use ttrpc::{Code, get_status};

use crate::task::TaskError;

/// A request that failed.
#[derive(Debug)]
pub(super) struct Refusal {
    code: Code,
    message: String,
}

impl Refusal {
    /// A method that panicked; the log has the details.
    pub(super) fn panicked(method: &str) -> Self {
        Self {
            code: Code::INTERNAL,
            message: format!("the shim broke in {method}; its log says where"),
        }
    }

    /// The shim is about to end; containerd must start a new shim.
    pub(super) fn shutting_down() -> Self {
        Self {
            code: Code::UNAVAILABLE,
            message: "the shim is shutting down".to_owned(),
        }
    }

    /// The refusal for an unknown container.
    pub(super) fn no_container(id: &str) -> Self {
        TaskError::NotFound(format!("container {id} not created")).into()
    }

    /// Writes it into the debug log: containerd's own log has it at the level that containerd
    /// chooses.
    pub(super) fn logged(self, method: &str) -> Self {
        tracing::debug!(method, code = ?self.code, "{}", self.message);
        self
    }
}

impl From<TaskError> for Refusal {
    fn from(error: TaskError) -> Self {
        Self {
            code: code(&error),
            message: error_chain(&error),
        }
    }
}

impl From<Refusal> for ttrpc::Error {
    fn from(refusal: Refusal) -> Self {
        Self::RpcStatus(get_status(refusal.code, refusal.message))
    }
}

fn code(error: &TaskError) -> Code {
    match error {
        TaskError::NotFound(_) => Code::NOT_FOUND,
        TaskError::AlreadyExists(_) => Code::ALREADY_EXISTS,
        TaskError::Invalid(_) | TaskError::Options(_) => Code::INVALID_ARGUMENT,
        TaskError::Illegal(_) => Code::FAILED_PRECONDITION,
        // Go's shim has no code for these either; containerd adds ": unknown" to the text.
        TaskError::Io(_)
        | TaskError::Watch(_)
        | TaskError::Step(_)
        | TaskError::Checkpoint { .. }
        | TaskError::Runtime { .. } => Code::UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::RuntimeError;

    #[test]
    fn a_failed_create_reads_as_with_gos_shim() {
        let source = RuntimeError::Failed {
            message: "runc create failed: no such file or directory".into(),
        };
        let refusal = Refusal::from(TaskError::Runtime {
            stage: "create",
            source,
        });
        assert_eq!(refusal.code, Code::UNKNOWN);
        assert_eq!(
            refusal.message,
            "OCI runtime create failed: runc create failed: no such file or directory"
        );
    }
}
