//! Sets the action of a signal.
#![allow(unsafe_code)]

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The action of a signal as this process had it.
#[derive(Debug)]
pub(crate) struct FormerAction(SigAction);

/// Lets the process ignore a signal. `None` if the kernel refuses.
pub(crate) fn ignore(signal: Signal) -> Option<FormerAction> {
    set(signal, &without_handler(SigHandler::SigIgn))
}

/// Gives a signal its default action.
pub(crate) fn set_default(signal: Signal) {
    set(signal, &without_handler(SigHandler::SigDfl));
}

/// Restores the earlier action of a signal.
pub(crate) fn restore(signal: Signal, former: &FormerAction) {
    set(signal, &former.0);
}

fn without_handler(action: SigHandler) -> SigAction {
    SigAction::new(action, SaFlags::empty(), SigSet::empty())
}

fn set(signal: Signal, action: &SigAction) -> Option<FormerAction> {
    // SAFETY: the action has no handler, or is an action that the process had before.
    unsafe { sigaction(signal, action) }.ok().map(FormerAction)
}
