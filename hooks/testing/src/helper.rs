//! The helper process of a test program.
//!
//! A test program has threads before its first test, and a process with threads must not be forked
//! without a later exec. So the helper process starts before `main`, as in the agent.
#![allow(unsafe_code, reason = "only the linker calls a function before main")]

use std::sync::OnceLock;

use bindguard_guard::refresh::HelperProcess;

static HELPER: OnceLock<HelperProcess> = OnceLock::new();

/// The functions in this section run before `main`.
#[used]
// SAFETY: the section holds pointers to functions of this type.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    // If the start fails, `helper` panics in the tests that need a helper process.
    let _ = HelperProcess::start().map(|helper| HELPER.set(helper));
}

/// The helper process of this test program. A forked test process starts its own helper process.
pub fn helper() -> &'static HelperProcess {
    // The linker drops a section to which nothing refers.
    std::hint::black_box(START);
    HELPER.get().expect("there is no helper process")
}
