//! The beginning of an admission, a check and a proof: a single read of config.json, and the policy
//! for its pod.

use std::borrow::Cow;
use std::path::Path;

use bindguard_core::annotations::policy_of_pod;
use bindguard_core::identity::Identity;
use bindguard_core::policy::Policy;
use bindguard_core::report::Report;
use bindguard_core::spec::{SpecError, SpecView};
use bindguard_sys::bundle::{BundleError, read_spec};
use bindguard_sys::{OldKernel, require_calls};

/// Why a bundle could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// config.json could not be read.
    #[error(transparent)]
    Read(#[from] BundleError),
    /// It is not a spec.
    #[error(transparent)]
    Parse(#[from] SpecError),
    /// Nothing can be compared and repaired on this kernel.
    #[error(transparent)]
    Kernel(#[from] OldKernel),
}

/// A report with the names that the bundle has. A bundle that cannot be read has no names: the runtime
/// reports the bundle.
pub(crate) fn named_report(bundle: &Path) -> Report {
    let mut report = Report::about_bundle(bundle);
    if let Ok(bytes) = read_spec(bundle)
        && let Ok(spec) = SpecView::from_bytes(&bytes)
    {
        report.container = Identity::from_spec(&spec);
    }
    report
}

/// A bundle whose spec is parsed, and the policy for its pod.
pub(crate) struct OpenBundle<'b> {
    /// The bundle's path.
    pub path: &'b Path,
    /// A view of its spec.
    pub spec: SpecView<'b>,
    /// The node's policy, with the changes of the pod's annotations.
    pub policy: Cow<'b, Policy>,
    /// Annotations that are not followed.
    not_followed: Vec<String>,
}

impl<'b> OpenBundle<'b> {
    /// The bundle at `path`, whose spec has these bytes. Relative sources are relative to `path`.
    ///
    /// # Errors
    /// If the kernel is too old, or the bytes are no spec.
    pub fn parse(bytes: &'b [u8], path: &'b Path, node: &'b Policy) -> Result<Self, OpenError> {
        require_calls()?;
        let spec = SpecView::from_bytes(bytes)?;
        let (policy, not_followed) = policy_of_pod(node, |name| spec.annotation(name));
        Ok(Self {
            path,
            spec,
            policy,
            not_followed,
        })
    }

    /// Adds the container's names, the parts that are not checked, and the annotations that are not
    /// followed.
    pub fn describe(&self, report: &mut Report) {
        report.container = Identity::from_spec(&self.spec);
        report.problems.extend(self.spec.overlooked());
        report.problems.extend(self.not_followed.iter().cloned());
    }
}
