//! A FUSE filesystem with one file, whose daemon needs a while for each look-up. See fuse(4).

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const INIT: u32 = 26;

/// Answers until the filesystem is unmounted, with a delay once the returned function is called.
/// The kernel caches no answer.
pub fn serve_after(device: Arc<File>, delay: Duration) -> impl Fn() {
    let is_slow = Arc::new(AtomicBool::new(false));
    let set_slow = Arc::clone(&is_slow);
    thread::spawn(move || {
        let mut request = vec![0; 1 << 17];
        loop {
            match (&*device).read(&mut request) {
                Ok(_) => {}
                // ENODEV: it is unmounted.
                Err(error) if error.raw_os_error() == Some(19) => return,
                // It is not mounted yet, or the request was taken back.
                Err(_) => {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
            }
            let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            let payload = match word(4) {
                INIT => init(),
                LOOKUP => {
                    thread::sleep(if is_slow.load(Ordering::Relaxed) {
                        delay
                    } else {
                        Duration::ZERO
                    });
                    [&2_u64.to_ne_bytes()[..], &[0; 32], &attributes(false)].concat()
                }
                GETATTR => [&[0; 16][..], &attributes(word(16) == 1)].concat(),
                _ => Vec::new(),
            };
            // ENOSYS
            let error = if payload.is_empty() { -38_i32 } else { 0 };
            let length = (16 + payload.len()) as u32;
            let answer = [
                &length.to_ne_bytes()[..],
                &error.to_ne_bytes(),
                &request[8..16],
                &payload,
            ]
            .concat();
            // A request that was taken back needs no answer.
            let _ = (&*device).write(&answer);
        }
    });
    move || set_slow.store(true, Ordering::Relaxed)
}

/// `fuse_init_out`, version 7.31, with `max_write`.
fn init() -> Vec<u8> {
    let mut answer = vec![0; 64];
    (answer[0], answer[4], answer[21]) = (7, 31, 16);
    answer
}

/// `fuse_attr` of the root or of its file.
fn attributes(is_root: bool) -> Vec<u8> {
    let (ino, mode): (u64, u32) = if is_root {
        (1, 0o40_755)
    } else {
        (2, 0o100_644)
    };
    [
        &ino.to_ne_bytes()[..],
        &[0; 52],
        &mode.to_ne_bytes(),
        &1_u32.to_ne_bytes(),
        &[0; 20],
    ]
    .concat()
}
