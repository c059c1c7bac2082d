//! Returns free memory of the heap to the kernel.
#![allow(unsafe_code, reason = "no library has a safe malloc_trim(3)")]

#[cfg(target_env = "gnu")]
use nix::libc;

/// Returns the unused pages of the heap to the kernel, including unused pages between used pages.
///
/// glibc shrinks its heap only from the end: a small block in use at the end keeps all memory
/// before the block.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, and locks the heap itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Pages in memory, proc_pid_statm(5).
    fn resident() -> usize {
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn free_pages_between_used_ones_are_returned() {
        // Every hundredth block stays: the heap cannot shrink, but most of its pages are unused.
        let mut blocks: Vec<_> = (0..100_000)
            .map(|number| Some(Box::new([number; 60])))
            .collect();
        blocks
            .iter_mut()
            .enumerate()
            .filter(|(number, _)| number % 100 != 0)
            .for_each(|(_, block)| drop(block.take()));
        let before = resident();
        trim_heap();
        assert!(
            resident() + 3000 < before,
            "{before} pages before, {} after",
            resident()
        );
        drop(blocks);
    }
}
