//! `--json` on a terminal: a pod's name, or a file's, must not reorder or rewrite the lines of a
//! report. JSON has an escape for every character, so programs read the same text.

use std::env;
use std::process::Command;

use bindguard_operator::terminal::print_json;
use serde_json::value::RawValue;
use serde_json::{Value, json};

const IS_PROGRAM: &str = "BINDGUARD_TEST_PRINTS";

/// Controls of C1, DEL, the separators of lines, and the Bidi_Control characters.
const NAME: &str =
    "a\u{202e}gpj\u{2066}\u{2028}\u{2029}\u{200e}\u{61c}\u{9b}2J\u{85}\u{7f}\u{e9}\u{1f600}";

#[test]
#[ignore = "another test runs this program"]
fn prints() {
    if env::var_os(IS_PROGRAM).is_none() {
        bindguard_testing::skipped("it is the program of another test");
        return;
    }
    // A line of the journal, whose text is kept.
    let line = serde_json::to_string(&json!({ "id": NAME })).unwrap();
    let line = RawValue::from_string(line).unwrap();
    let report = vec![
        line,
        RawValue::from_string(json!({NAME: NAME}).to_string()).unwrap(),
    ];
    print_json(&report).unwrap();
}

#[test]
fn json_reports_escape_what_misleads_a_reader() {
    let mut program = Command::new(env::current_exe().unwrap());
    program
        .args(["--exact", "json_for_terminals::prints", "--ignored"])
        .args(["--nocapture", "--quiet"])
        .env(IS_PROGRAM, "1");
    let ended = program.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let printed = String::from_utf8(ended.stdout).unwrap();
    let (start, end) = (printed.find('['), printed.rfind(']'));
    let json = &printed[start.unwrap()..=end.unwrap()];
    let is_misleading = |c: &char| !"\n\u{e9}\u{1f600}".contains(*c) && !(' '..='~').contains(c);
    let misleading: Vec<char> = json.chars().filter(is_misleading).collect();
    assert!(misleading.is_empty(), "{misleading:?}");
    // A filter of escape sequences on the way to the terminal must not remove a character.
    let read: Value = serde_json::from_str(json).unwrap();
    assert_eq!(read, json!([{ "id": NAME }, { NAME: NAME }]));
}
