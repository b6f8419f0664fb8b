//! Obstacles on the way to a connection: on which side, and the remedy.

use std::io;
use std::time::Duration;

/// Why there is no connection to an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// The network has no such addresses.
    #[error("this is no address of its network; take the address that the peer's engine gives")]
    Address,
    /// The peer's machine answers, and nothing listens there.
    #[error(
        "nothing listens there ({0}): the peer's process has ended, or has not begun; ask it for its address again"
    )]
    Refused(String),
    /// This machine cannot send anything there.
    #[error("this machine has no route there ({0}); check this machine's network and the peer's address")]
    NoRoute(String),
    /// The peer's machine gave no sign.
    #[error(
        "timed out: no answer came within {0:?}; the peer's machine is off, or something between the machines drops packets"
    )]
    NoAnswer(Duration),
    /// The peer's machine takes connections, and the engine there says nothing.
    #[error(
        "timed out: the peer's machine took the connection, but its engine did not answer within {0:?}; its process is stopped, \
         overloaded, or out of file descriptors"
    )]
    Silent(Duration),
    /// The peer's engine has answered, and did not take the connection.
    #[error(
        "timed out: the peer's engine answered, but did not confirm the connection within {0:?}; it may have no way back to this machine"
    )]
    Unconfirmed(Duration),
    /// This process may open no more files.
    #[error("this process has no file descriptors left ({0}); close some, or raise its limit (ulimit -n)")]
    OutOfFiles(String),
    /// Anything else that this machine's system says.
    #[error("this machine's system says: {0}")]
    System(String),
}

impl Obstacle {
    /// The obstacle that the system's error stands for.
    pub(crate) fn of(error: &io::Error) -> Self {
        let words = error.to_string();
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Self::OutOfFiles(words),
            Some(libc::ECONNREFUSED) => Self::Refused(words),
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN) => Self::NoRoute(words),
            _ if error.kind() == io::ErrorKind::ConnectionRefused => Self::Refused(words),
            _ => Self::System(words),
        }
    }
}

/// Longest address in an error, in characters.
const LONGEST: usize = 128;

/// An address in words: as text where it is one, and in hexadecimal digits otherwise.
pub(crate) fn spelled(endpoint: &[u8]) -> String {
    match std::str::from_utf8(endpoint) {
        Ok(text) if !text.is_empty() && !text.contains(char::is_control) => text.chars().take(LONGEST).collect(),
        _ => endpoint.iter().take(LONGEST / 2).map(|byte| format!("{byte:02x}")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_errors_say_which_side_lacks_what() {
        for (code, words) in [
            (libc::ECONNREFUSED, "nothing listens there (Connection refused"),
            (libc::ENETUNREACH, "this machine has no route there (Network is unreachable"),
            (libc::EHOSTUNREACH, "this machine has no route there (No route to host"),
            (libc::EMFILE, "this process has no file descriptors left (Too many open files"),
            (libc::EACCES, "this machine's system says: Permission denied"),
        ] {
            let text = Obstacle::of(&io::Error::from_raw_os_error(code)).to_string();
            assert!(text.starts_with(words), "{text}");
        }
    }

    #[test]
    fn addresses_are_readable_and_short() {
        assert_eq!(spelled(b"10.0.0.7:4711"), "10.0.0.7:4711");
        assert_eq!(spelled(b"a\nb"), "610a62");
        assert_eq!(spelled(&[0xff, 1]), "ff01");
        assert!(spelled(&[b'a'; 5000]).len() <= LONGEST && spelled(&[0xff; 5000]).len() <= LONGEST);
    }
}
