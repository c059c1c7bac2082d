//! Limits for reading a mount table, and the reasons for refusing a table.
//!
//! A container decides how long its own mount table is: 3,000 binds below a long name are 86 MB of
//! text. A table beyond a limit is an error, never a shorter or empty table.

use super::parse::ParseError;

/// The limits for a mount table. A reader stops at the first exceeded limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableLimits {
    /// Bytes of text: the reader's time.
    pub text: usize,
    /// Mounts.
    pub mounts: usize,
    /// Bytes of a line.
    pub line: usize,
    /// Bytes that the parsed mounts may occupy: the reader's memory.
    pub memory: usize,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

impl TableLimits {
    /// For the reader's own namespace. No container can add a line to this table, users of the node
    /// can add few, and a create must not fail on a large node.
    ///
    /// The kernel's own limit is `fs.mount-max`, by default 100,000 mounts. 30,000 mounts of a
    /// kubelet are 12 MB of text.
    pub const HOST: Self = Self {
        text: 512 * MIB,
        mounts: 1_000_000,
        line: MIB,
        memory: usize::MAX,
    };

    /// For the table of any other process, which a container may have filled.
    ///
    /// A container that binds the host's root has the host's mounts: 28,000 mounts are 11 MB of
    /// text and 12 MiB in memory. The kernel prints 32 MiB in 45 ms, so a hostile table delays its
    /// neighbours by less than 0.1 s. A line has a page of options and two paths of at most 4 KiB,
    /// which escapes make four times longer. The agent is limited to 64 MiB and has at most three
    /// such tables at once: two refreshes and the survey.
    pub const CONTAINER: Self = Self {
        text: 32 * MIB,
        mounts: 65_536,
        line: 64 * KIB,
        memory: 12 * MIB,
    };
}

/// Why a mount table was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A line is not a mount.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The text ends in the middle of a line.
    #[error("its last line is cut off")]
    CutOff,
    /// The table exceeds a limit, and none of its mounts is known.
    #[error("the mount table is too large: {0}")]
    TooLarge(ExceededLimit),
}

/// The limit that a mount table exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExceededLimit {
    /// [`TableLimits::text`]
    #[error("more than {} KiB of text", .0 / KIB)]
    Text(usize),
    /// [`TableLimits::mounts`]
    #[error("more than {0} mounts")]
    Mounts(usize),
    /// [`TableLimits::line`]
    #[error("a line of more than {} KiB", .0 / KIB)]
    Line(usize),
    /// [`TableLimits::memory`]
    #[error("its mounts need more than {} KiB of memory", .0 / KIB)]
    Memory(usize),
}
