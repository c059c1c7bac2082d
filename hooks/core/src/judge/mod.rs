//! Derives findings from evidence. Every rule for stale, orphaned or pinning is in this folder.

mod fit;
mod host_root;
mod path_in_volume;
mod place;
mod reach;
mod remedy;
mod subpath;
mod verdict;
mod volume;

pub use fit::Fit;
pub use host_root::judge_host_root;
pub use path_in_volume::{NotInVolume, PathInVolume};
pub use place::{Expected, ExpectedTarget, OnIt, Shown, judge};
pub use reach::judge_reach;
pub use remedy::{NoRemedy, Remedy, RepairMethod};
pub use subpath::judge_subpath;
pub use verdict::{Finding, Lack, Pinning, StaleCause, Unmounted, Verdict, VerdictName};
pub use volume::{judge_plain_volume, judge_volume};
