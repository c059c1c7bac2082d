//! From evidence to findings. Every rule of what counts as stale, orphaned or pinning is in this folder.

mod host_root;
mod subpath;
mod verdict;

pub use host_root::judge_host_root;
pub use subpath::judge_subpath;
pub use verdict::{Finding, Lack, Pinning, Remedy, StaleCause, Verdict, Way};
