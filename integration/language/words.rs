//! The words that this project once used in a sense of its own, each with the words of the field.

/// A phrase, in lower case, and the words to use instead.
pub type Phrase = (&'static str, &'static str);

/// Every phrase that is not to be used.
pub const PRIVATE: &[Phrase] = &[
    ("tell", REPORT),
    ("tells", REPORT),
    ("told", REPORT),
    ("telling", REPORT),
    ("ask", REQUEST),
    ("asks", REQUEST),
    ("asked", REQUEST),
    ("asking", REQUEST),
    ("look at", CHECK),
    ("looks at", CHECK),
    ("looked at", CHECK),
    ("looking at", CHECK),
    ("hear", RECEIVE),
    ("hears", RECEIVE),
    ("heard", RECEIVE),
    ("mend", REPAIR),
    ("mends", REPAIR),
    ("mended", REPAIR),
    ("mending", REPAIR),
    ("nobody", NAME),
    ("somebody", NAME),
    ("whoever", NAME),
    ("in force", "active, applies"),
    ("as it shall", "unchanged"),
    ("as it should be", "correct, current, healthy"),
    ("as they should be", "correct, current, healthy"),
    ("all is well", "no problems"),
    ("is well", "is healthy, is correct"),
    ("once more", "again"),
    ("all the same", "anyway, nevertheless"),
    ("as a rule", "usually, normally"),
    ("leavings", "leftovers"),
    ("lets go", "closes, releases"),
    ("let go", "close, release"),
    ("wary", "the property that matters, such as may block"),
    ("apart", "separate, separately"),
    ("stands in", "is in"),
    ("stands for", "means, represents"),
    ("stands beside", "is next to"),
    ("stand beside", "are next to"),
    ("be it", "whether"),
    ("the like", "similar ones"),
    ("and the like", "name them"),
    ("makes anew", "creates again"),
    ("made anew", "created again"),
];

const REPORT: &str = "report, detect, distinguish, show";
const REQUEST: &str = "request, query, probe, require";
const CHECK: &str = "check, inspect, read";
const RECEIVE: &str = "receive, detect, learn";
const REPAIR: &str = "repair, fix";
const NAME: &str = "name the actor";
