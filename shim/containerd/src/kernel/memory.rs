//! Returns the memory that the stack keeps after a burst; changes the process's environment.

use std::env;
use std::ffi::OsString;

use nix::libc;

/// The size of the stack below the caller that is returned to the system. The kernel gives the main
/// thread 128 KiB from the start (setup_arg_pages in fs/exec.c), and leaves a gap of a megabyte
/// below, so nothing else can be there.
const STACK: usize = 128 * 1024;
/// The stack to keep below the caller, for the frames of `release_stack`.
const MARGIN: usize = 1024;
const PAGE: usize = 4096;

/// Sets or removes a variable of this process's environment. Call while the process has a single
/// thread.
pub fn set_environment(name: &str, value: Option<OsString>) {
    // SAFETY: there is no other thread that could read the environment meanwhile.
    unsafe {
        match value {
            Some(value) => env::set_var(name, value),
            None => env::remove_var(name),
        }
    }
}

/// Returns the pages that deeper calls left on the calling thread's stack to the system. The stack
/// must have 128 KiB below the caller, used or not: the event loop's stack has them, and those of
/// this crate's own threads.
#[inline(never)]
pub fn release_stack() {
    let here = 0_u8;
    let here = std::hint::black_box(&raw const here).addr();
    let end = (here - MARGIN) & !(PAGE - 1);
    // SAFETY: the range is on this thread's stack, or where nothing can be mapped, and below all
    // live frames: no code reads it before writing. An error means at most that a part of it was
    // never used.
    unsafe {
        libc::madvise(
            std::ptr::with_exposed_provenance_mut(end - STACK),
            STACK,
            libc::MADV_DONTNEED,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// The number of resident pages below the caller, see "pagemap" in the kernel's documentation.
    #[inline(never)]
    fn pages_below() -> usize {
        let here = 0_u8;
        let first = (std::hint::black_box(&raw const here).addr() - MARGIN - 64 * 1024) / PAGE;
        let mut entries = [0; 8 * 16];
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        pagemap
            .read_exact_at(&mut entries, (first * 8) as u64)
            .unwrap();
        entries
            .chunks(8)
            .filter(|entry| entry[7] & 0x80 != 0)
            .count()
    }

    #[inline(never)]
    fn go_deep() {
        let mut deep = [7_u8; 96 * 1024];
        std::hint::black_box(&mut deep);
    }

    #[test]
    fn unused_stack_pages_are_released() {
        let thread = std::thread::Builder::new()
            .stack_size(512 * 1024)
            .spawn(|| {
                go_deep();
                let before = pages_below();
                release_stack();
                (before, pages_below())
            });
        assert_eq!(thread.unwrap().join().unwrap(), (16, 0));
    }
}
