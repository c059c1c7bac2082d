//! The fields of `/proc/PID/stat`, by their numbers in proc_pid_stat(5).

pub const PARENT: usize = 4;

/// The time of the start, in the kernel's ticks since the boot.
pub const START_TIME: usize = 22;

/// A field as a number, from the third on. `None` if the text has no such field, or if the field is
/// no number.
pub fn number(stat: &str, field: usize) -> Option<u64> {
    // The program's name in parentheses may have spaces and parentheses itself.
    let (_, from_third) = stat.rsplit_once(") ")?;
    let after = field.checked_sub(3)?;
    from_third.split_whitespace().nth(after)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_moves_no_field() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0\n";
        assert_eq!(number(stat, PARENT), Some(1));
        assert_eq!(number(stat, START_TIME), Some(123_456));
        assert_eq!(number(stat, 3), None);
        assert_eq!(number(stat, 2), None);
        assert_eq!(number("7 (cut", PARENT), None);
    }
}
