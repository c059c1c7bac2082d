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
    use super::*;

    /// The number of pages in memory, mincore(2), of those that lie whole in these blocks' range.
    fn resident(from: usize, to: usize) -> usize {
        const PAGE: usize = 4096;
        let (from, to) = (from.next_multiple_of(PAGE), to / PAGE * PAGE);
        let mut pages = vec![0_u8; (to - from) / PAGE];
        // SAFETY: mincore(2) writes a byte for each page of the range, which the blocks keep mapped.
        let failed =
            unsafe { libc::mincore(from as *mut libc::c_void, to - from, pages.as_mut_ptr()) };
        assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    /// Counts the pages of its own blocks: tests beside this one use memory, too.
    #[test]
    fn free_pages_between_used_ones_are_returned() {
        // Every hundredth block stays: the heap cannot shrink, but most of its pages are unused.
        let mut blocks = Vec::new();
        for number in 0..100_000 {
            blocks.push(Some(Box::new([number; 60])));
        }
        for (number, block) in blocks.iter_mut().enumerate() {
            if number % 100 != 0 {
                *block = None;
            }
        }
        let mut kept: Vec<usize> = Vec::new();
        for block in blocks.iter().flatten() {
            kept.push(std::ptr::from_ref(&**block).addr());
        }
        kept.sort_unstable();
        let pages = || {
            let mut pages = 0;
            for pair in kept.windows(2) {
                // Blocks of an arena lie beside each other; between two arenas nothing is mapped.
                if pair[1] - pair[0] < 1 << 20 {
                    pages += resident(pair[0], pair[1]);
                }
            }
            pages
        };
        let before = pages();
        trim_heap();
        let after = pages();
        assert!(
            after + 3000 < before,
            "{before} pages before, {after} after"
        );
        drop(blocks);
    }
}
