//! The command line as containerd writes it.
//!
//! containerd starts every shim like a Go program: flags with a single dash, the value after `=` or
//! as the next argument, the verb last. As in Go, an unknown flag is an error, and all verbs but
//! the queries need a namespace.

/// The verb on the command line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ShimVerb {
    /// No verb: run the server that supervises containers.
    #[default]
    Serve,
    /// Find or start the server of a container, and print its address.
    Start,
    /// Clean up after a server that died.
    Delete,
    /// Print the features of this shim and its runtime.
    Info,
    /// Print the version.
    Version,
    /// Print the usage text.
    Help,
}

pub const USAGE: &str = "\
Usage: containerd-shim-bindguard-v2 [FLAGS] [start|delete]
containerd runs this program. Without a verb it serves on the socket that is its stdin.

  -namespace NAME       containerd's namespace of the container
  -id ID                the container
  -address PATH         containerd's socket
  -bundle PATH          the container's bundle, for delete
  -socket PATH          serve on this socket
  -debug                log more
  -info                 read the runtime's options from stdin, print a RuntimeInfo
  -v, -version          print the version
  -h, -help             print this text
  -publish-binary PATH, -debug-socket PATH
                        have no effect";

/// The flags of containerd's shim protocol.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    pub verb: ShimVerb,
    /// containerd's namespace, such as `k8s.io`.
    pub namespace: String,
    /// The container (or sandbox) the call is about.
    pub id: String,
    /// containerd's own gRPC socket.
    pub address: String,
    /// The bundle, given to `delete` only.
    pub bundle: String,
    /// The path to serve on; empty for the socket that `start` passes.
    pub socket: String,
    /// Log more.
    pub debug: bool,
}

/// A command line that cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ArgsError {
    message: String,
    /// The exit code of Go's shim: 2 if its flag package refuses the flags.
    pub exit_code: u8,
}

fn refused(exit_code: u8, message: String) -> ArgsError {
    ArgsError { message, exit_code }
}

impl Args {
    /// Reads the arguments that follow the program's name.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, ArgsError> {
        let mut args = Self::default();
        let mut query = None;
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            match word.strip_prefix("--").or_else(|| word.strip_prefix('-')) {
                Some(flag) => query = args.take_flag(flag, &mut words)?.or(query),
                None => {
                    args.verb = match &*word {
                        "start" => ShimVerb::Start,
                        "delete" => ShimVerb::Delete,
                        _ => return Err(refused(1, format!("unknown verb {word:?}"))),
                    }
                }
            }
        }
        args.verb = query.unwrap_or(args.verb);
        let is_query = !matches!(
            args.verb,
            ShimVerb::Serve | ShimVerb::Start | ShimVerb::Delete
        );
        if args.namespace.is_empty() && !is_query {
            return Err(refused(1, "the namespace is empty".to_owned()));
        }
        Ok(args)
    }

    /// Takes a flag and its value. Returns the query if the flag is a query, which counts with any
    /// verb.
    fn take_flag(
        &mut self,
        flag: &str,
        rest: &mut impl Iterator<Item = String>,
    ) -> Result<Option<ShimVerb>, ArgsError> {
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        let mut ignored = String::new();
        let field = match name {
            "debug" => {
                self.debug = boolean(name, value)?;
                return Ok(None);
            }
            "v" | "version" => return Ok(boolean(name, value)?.then_some(ShimVerb::Version)),
            "info" => return Ok(boolean(name, value)?.then_some(ShimVerb::Info)),
            "h" | "help" => return Ok(Some(ShimVerb::Help)),
            "namespace" => &mut self.namespace,
            "id" => &mut self.id,
            "address" => &mut self.address,
            "bundle" => &mut self.bundle,
            "socket" => &mut self.socket,
            // The binary that published events before ttrpc existed, and the socket of Go's
            // profiler.
            "publish-binary" | "debug-socket" => &mut ignored,
            _ => return Err(refused(2, format!("unknown flag -{name}"))),
        };
        *field = value
            .or_else(|| rest.next())
            .ok_or_else(|| refused(2, format!("flag -{name} needs a value")))?;
        Ok(None)
    }
}

/// Go's boolean flags take a value only after `=`.
fn boolean(name: &str, value: Option<String>) -> Result<bool, ArgsError> {
    match value.as_deref() {
        None | Some("true" | "1" | "t" | "T" | "TRUE" | "True") => Ok(true),
        Some("false" | "0" | "f" | "F" | "FALSE" | "False") => Ok(false),
        Some(value) => {
            let message = format!("flag -{name}: {value:?} is no boolean");
            Err(refused(2, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    fn error(line: &str) -> String {
        let error = parse(line).unwrap_err();
        format!("{}: {error}", error.exit_code)
    }

    #[test]
    fn the_arguments_of_containerd_1_6() {
        let args =
            parse("-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id abc start").unwrap();
        assert_eq!(args.verb, ShimVerb::Start);
        assert_eq!(
            (
                args.namespace.as_str(),
                args.id.as_str(),
                args.address.as_str()
            ),
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
        let args = parse("-namespace n -debug -id x start").unwrap();
        assert!(args.debug);
        assert_eq!((args.id.as_str(), args.verb), ("x", ShimVerb::Start));
        assert!(!parse("-namespace n -debug=false").unwrap().debug);
    }

    #[test]
    fn no_verb_means_serve_and_queries_are_flags() {
        assert_eq!(parse("-namespace n -id i").unwrap().verb, ShimVerb::Serve);
        assert_eq!(parse("-v").unwrap().verb, ShimVerb::Version);
        assert_eq!(parse("-info").unwrap().verb, ShimVerb::Info);
        assert_eq!(parse("-info start").unwrap().verb, ShimVerb::Info);
        assert_eq!(parse("--help").unwrap().verb, ShimVerb::Help);
        assert_eq!(parse("-h -namespace n start").unwrap().verb, ShimVerb::Help);
    }

    #[test]
    fn a_socket_of_the_callers() {
        assert_eq!(parse("-namespace n -socket /s").unwrap().socket, "/s");
    }

    /// As Go's shim.
    #[test]
    fn only_queries_need_no_namespace() {
        for line in ["", "-id i start", "-namespace= -id i start", "-id i delete"] {
            assert_eq!(error(line), "1: the namespace is empty", "{line}");
        }
        assert_eq!(error("-v=false"), "1: the namespace is empty");
    }

    #[test]
    fn invalid_arguments_are_errors() {
        for (line, expected) in [
            ("-id", "2: flag -id needs a value"),
            ("-i d", "2: unknown flag -i"),
            ("-id i dance", "1: unknown verb \"dance\""),
            ("-shiny=new -id i start", "2: unknown flag -shiny"),
            ("-debug=maybe", "2: flag -debug: \"maybe\" is no boolean"),
        ] {
            assert_eq!(error(line), expected);
        }
    }
}
