//! The command line as containerd writes it.
//!
//! containerd starts every shim like a Go program: flags with one dash, the value after `=` or as the next argument, the verb
//! last. Go rejects an unknown flag. This parser skips it with its `=value`, because a newer containerd may add flags.

/// The purpose that this process was started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShimVerb {
    /// No verb: run the server that supervises containers.
    Serve,
    /// Find or start the server of a container, and print its address.
    Start,
    /// Clean up after a server that died.
    Delete,
    /// Print the features of this shim and its runtime.
    Info,
    /// Print the version.
    Version,
}

/// The flags of containerd's shim protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Args {
    /// The action.
    pub(crate) verb: ShimVerb,
    /// containerd's namespace, such as `k8s.io`.
    pub(crate) namespace: String,
    /// The container (or sandbox) the call is about.
    pub(crate) id: String,
    /// containerd's own gRPC socket.
    pub(crate) address: String,
    /// The bundle, given to `delete` only.
    pub(crate) bundle: String,
    /// Log more.
    pub(crate) debug: bool,
}

/// A command line that cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgsError {
    /// The last argument is a flag that needs a value.
    #[error("flag -{0} needs a value")]
    NoValue(String),
    /// A word that is no verb of the protocol.
    #[error("unknown verb {0:?}")]
    UnknownVerb(String),
}

impl Args {
    /// Reads the arguments that follow the program's name.
    pub(crate) fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, ArgsError> {
        let mut args = Self {
            verb: ShimVerb::Serve,
            namespace: String::new(),
            id: String::new(),
            address: String::new(),
            bundle: String::new(),
            debug: false,
        };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            match word.strip_prefix("--").or_else(|| word.strip_prefix('-')) {
                Some(flag) => args.take_flag(flag, &mut words)?,
                None => args.verb = verb(&word)?,
            }
        }
        Ok(args)
    }

    fn take_flag(&mut self, flag: &str, rest: &mut impl Iterator<Item = String>) -> Result<(), ArgsError> {
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        // Go's boolean flags take a value only after `=`.
        let on = || value.as_deref().is_none_or(|v| matches!(v, "true" | "1" | "t" | "T" | "TRUE" | "True"));
        match name {
            "debug" => self.debug = on(),
            "v" | "version" if on() => self.verb = ShimVerb::Version,
            "info" if on() => self.verb = ShimVerb::Info,
            "namespace" | "id" | "address" | "bundle" | "publish-binary" | "socket" => {
                let value = value.or_else(|| rest.next()).ok_or_else(|| ArgsError::NoValue(name.to_owned()))?;
                self.set(name, value);
            }
            _ => {}
        }
        Ok(())
    }

    fn set(&mut self, name: &str, value: String) {
        match name {
            "namespace" => self.namespace = value,
            "id" => self.id = value,
            "address" => self.address = value,
            "bundle" => self.bundle = value,
            // The binary that published events before ttrpc existed, and a socket path that no caller sends.
            _ => {}
        }
    }
}

fn verb(word: &str) -> Result<ShimVerb, ArgsError> {
    match word {
        "start" => Ok(ShimVerb::Start),
        "delete" => Ok(ShimVerb::Delete),
        other => Err(ArgsError::UnknownVerb(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn the_arguments_of_containerd_1_6() {
        let args =
            parse("-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id abc start").unwrap();
        assert_eq!(args.verb, ShimVerb::Start);
        assert_eq!(
            (args.namespace.as_str(), args.id.as_str(), args.address.as_str()),
            ("k8s.io", "abc", "/run/c.sock")
        );
        assert!(!args.debug);
    }

    #[test]
    fn two_dashes_and_equal_signs_are_the_same() {
        let args = parse("--namespace=default --id=a=b --bundle /b -debug=true delete").unwrap();
        assert_eq!(args.verb, ShimVerb::Delete);
        assert_eq!((args.id.as_str(), args.bundle.as_str()), ("a=b", "/b"));
        assert!(args.debug);
    }

    #[test]
    fn booleans_do_not_eat_the_next_word() {
        let args = parse("-debug -id x start").unwrap();
        assert!(args.debug);
        assert_eq!((args.id.as_str(), args.verb), ("x", ShimVerb::Start));
        assert!(!parse("-debug=false").unwrap().debug);
    }

    #[test]
    fn no_verb_means_serve_and_queries_are_flags() {
        assert_eq!(parse("-namespace n -id i").unwrap().verb, ShimVerb::Serve);
        assert_eq!(parse("-v").unwrap().verb, ShimVerb::Version);
        assert_eq!(parse("-info").unwrap().verb, ShimVerb::Info);
    }

    #[test]
    fn an_unknown_flag_is_skipped() {
        assert_eq!(parse("-shiny=new -id i start").unwrap().id, "i");
    }

    #[test]
    fn invalid_arguments_are_errors() {
        assert_eq!(parse("-id"), Err(ArgsError::NoValue("id".into())));
        assert_eq!(parse("-id i dance"), Err(ArgsError::UnknownVerb("dance".into())));
    }
}
