//! `#[test_if(own_namespace)]`: a test that runs only where a function of the test's scope says so.
//!
//! The function prints why a test is skipped, so that a skip is never silent. It runs on the test's
//! own thread: `own_namespace` gives that thread a mount namespace.

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Marks a test, and begins it with `if !(CONDITION()) { return; }`.
#[proc_macro_attribute]
pub fn test_if(condition: TokenStream, test: TokenStream) -> TokenStream {
    let mut test: Vec<TokenTree> = test.into_iter().collect();
    let Some(TokenTree::Group(body)) = test.pop() else {
        return "compile_error!(\"`test_if` is for a function\");"
            .parse()
            .unwrap_or_default();
    };
    let mut guarded: TokenStream = "if !".parse().unwrap_or_default();
    guarded.extend(condition);
    guarded.extend("() { return; }".parse::<TokenStream>().unwrap_or_default());
    guarded.extend(body.stream());
    let mut body_with_condition = Group::new(Delimiter::Brace, guarded);
    body_with_condition.set_span(body.span());
    test.push(TokenTree::Group(body_with_condition));

    let mut marked: TokenStream = "#[::core::prelude::v1::test]".parse().unwrap_or_default();
    marked.extend(test);
    marked
}
