//! An enum without fields whose variants have a text each.

/// Declares the enum, the list of all variants, and the function that returns the text.
macro_rules! named_variants {
    (
        $(#[$about_type:meta])* $type:ident,
        $(#[$about_text:meta])* $text:ident,
        $($(#[$about:meta])* $variant:ident = $literal:literal,)*
    ) => {
        $(#[$about_type])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type {
            $($(#[$about])* $variant,)*
        }

        impl $type {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            $(#[$about_text])*
            pub fn $text(self) -> &'static str {
                match self {
                    $(Self::$variant => $literal,)*
                }
            }
        }
    };
}

pub(crate) use named_variants;
