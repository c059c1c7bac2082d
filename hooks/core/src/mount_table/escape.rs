//! The octal escapes of mountinfo: space, tab, newline and backslash, and `#` in sources.
//!
//! Mirrors the kernel's `mangle_path`, which `seq_path` and `mangle` call with these characters.

/// Undoes the kernel's escapes. A backslash without three octal digits is kept: the kernel writes
/// no such backslash, and refusing the table for it has no benefit.
pub(super) fn unescape(field: &[u8]) -> Vec<u8> {
    // Nearly no field has escapes: one copy is faster than a push for each byte.
    if !field.contains(&b'\\') {
        return field.to_vec();
    }
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        match (first, octal(behind)) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                rest = &behind[3..];
            }
            _ => {
                out.push(first);
                rest = behind;
            }
        }
    }
    out
}

fn octal(digits: &[u8]) -> Option<u8> {
    let three = digits.get(..3)?;
    let value = three.iter().try_fold(0u16, |value, &digit| {
        matches!(digit, b'0'..=b'7').then(|| value * 8 + u16::from(digit - b'0'))
    })?;
    u8::try_from(value).ok()
}

/// Escapes as the kernel does.
pub(super) fn escape(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => {
                out.extend_from_slice(format!("\\{byte:03o}").as_bytes())
            }
            plain => out.push(plain),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_escaped_path_is_restored() {
        assert_eq!(escape(b"a b\\c\nd"), b"a\\040b\\134c\\012d");
        assert_eq!(unescape(b"a\\040b\\134c\\012d"), b"a b\\c\nd");
        assert_eq!(
            unescape(b"lone\\ and \\08 and \\777"),
            b"lone\\ and \\08 and \\777"
        );
    }
}
