//! The three rules, on a passage.

use super::prose::{Passage, TextKind};
use super::words::PRIVATE;

/// The longest sentence of a document, in words.
const MAX_WORDS: usize = 40;
const QUESTION_WORDS: [&str; 6] = ["what", "whether", "who", "whose", "how", "where"];

/// Each problem of a passage: its line in the file, and the text for its author.
pub fn problems(passage: &Passage) -> Vec<(usize, String)> {
    let words = words(passage);
    let mut found = Vec::new();
    for (phrase, instead) in PRIVATE {
        let length = phrase.split(' ').count();
        let uses = words
            .windows(length)
            .filter(|window| window.iter().map(|(_, word)| word).eq(phrase.split(' ')));
        found.extend(uses.map(|window| (window[0].0, format!("\"{phrase}\": write {instead}"))));
    }
    if passage.place == TextKind::DocComment
        && let Some((line, first)) = words
            .first()
            .filter(|(_, first)| QUESTION_WORDS.contains(&first.as_str()))
    {
        found.push((
            *line,
            format!("a doc comment opens with \"{first}\": name the thing"),
        ));
    }
    if passage.place == TextKind::Document {
        let long = sentences(&passage.text).filter(|sentence| count(sentence) > MAX_WORDS);
        found.extend(long.map(|sentence| {
            let beginning: String = sentence.chars().take(50).collect();
            (
                passage.line,
                format!("a sentence of {} words: {beginning:?}", count(sentence)),
            )
        }));
    }
    found
}

/// The words in lower case, each with its line in the file.
fn words(passage: &Passage) -> Vec<(usize, String)> {
    let of_line = |text: &str| {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_');
        words
            .filter(|word| !word.is_empty())
            .map(str::to_lowercase)
            .collect::<Vec<_>>()
    };
    let lines = (passage.line..).zip(passage.text.lines());
    lines
        .flat_map(|(line, text)| of_line(text).into_iter().map(move |word| (line, word)))
        .collect()
}

fn sentences(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = [". ", "? ", "! ", ".\n", "?\n", "!\n"]
            .iter()
            .filter_map(|end| rest.find(end))
            .min()
            .map_or(rest.len(), |end| end + 1);
        let (sentence, tail) = rest.split_at(end);
        rest = tail;
        (!sentence.is_empty()).then(|| sentence.trim())
    })
}

fn count(sentence: &str) -> usize {
    sentence.split_whitespace().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(text: &str, place: TextKind) -> Vec<(usize, String)> {
        problems(&Passage {
            line: 1,
            text: text.to_owned(),
            place,
        })
    }

    #[test]
    fn a_private_word_is_found_as_a_whole_word() {
        assert_eq!(
            problems_of("The journal is told so.", TextKind::Comment).len(),
            1
        );
        assert_eq!(
            problems_of("An untold tellurium task.", TextKind::Comment),
            vec![]
        );
        assert_eq!(
            problems_of("First.\nIt told all.", TextKind::Comment)[0].0,
            2
        );
    }

    #[test]
    fn a_doc_comment_names_the_thing() {
        assert_eq!(
            problems_of("Whether it is one.", TextKind::DocComment).len(),
            1
        );
        assert_eq!(problems_of("Whether it is one.", TextKind::Comment), vec![]);
    }

    #[test]
    fn a_long_sentence_is_found_in_documents() {
        let sentence = format!("{}.", "word ".repeat(41).trim());
        assert_eq!(
            problems_of(&format!("Short. {sentence} Short."), TextKind::Document).len(),
            1
        );
        assert_eq!(
            problems_of(
                &sentence.replace("word word", "word. word"),
                TextKind::Document
            ),
            vec![]
        );
    }
}
