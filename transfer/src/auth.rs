//! The shared secret of connection set-up: each side proves that it has it, over what both have said.
//!
//! HMAC-SHA-256 (RFC 2104) over a label of the role and both introductions, whose nonces make every proof a new one. It
//! keeps strangers and mixed-up deployments out. It does not encrypt, and it does not protect later frames on the wire.

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

use crate::message::{Introduction, Mac};

/// Which side proves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Connecting,
    Accepting,
}

fn keyed(secret: &[u8], role: Role, connecting: &Introduction, accepting: &Introduction) -> Option<Hmac<Sha256>> {
    let mut hmac = Hmac::<Sha256>::new_from_slice(secret).ok()?;
    hmac.update(match role {
        Role::Connecting => b"putget_transfer connecting",
        Role::Accepting => b"putget_transfer accepting ",
    });
    for side in [connecting, accepting] {
        let transcript = side.transcript();
        hmac.update(&(transcript.len() as u64).to_le_bytes());
        hmac.update(&transcript);
    }
    Some(hmac)
}

/// The proof of one side. Without a secret it is all zeros.
pub(crate) fn prove(secret: Option<&[u8]>, role: Role, connecting: &Introduction, accepting: &Introduction) -> Mac {
    secret
        .and_then(|secret| keyed(secret, role, connecting, accepting))
        .map_or([0; 32], |hmac| hmac.finalize().into_bytes().into())
}

/// Checks a proof, in constant time.
pub(crate) fn verify(
    secret: Option<&[u8]>,
    role: Role,
    connecting: &Introduction,
    accepting: &Introduction,
    mac: &Mac,
) -> bool {
    match secret {
        None => *mac == [0; 32],
        Some(secret) => keyed(secret, role, connecting, accepting).is_some_and(|hmac| hmac.verify_slice(mac).is_ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(session: u64) -> Introduction {
        Introduction { session, nonce: [session as u8; 16], heartbeat_timeout_ms: 1, nics: Vec::new() }
    }

    #[test]
    fn only_the_same_secret_role_and_words_verify() {
        let (a, b) = (side(1), side(2));
        let mac = prove(Some(b"secret"), Role::Connecting, &a, &b);
        assert!(verify(Some(b"secret"), Role::Connecting, &a, &b, &mac));
        assert!(!verify(Some(b"other"), Role::Connecting, &a, &b, &mac));
        assert!(!verify(Some(b"secret"), Role::Accepting, &a, &b, &mac));
        assert!(!verify(Some(b"secret"), Role::Connecting, &b, &a, &mac));
        assert!(!verify(Some(b"secret"), Role::Connecting, &a, &side(3), &mac));
        assert!(!verify(None, Role::Connecting, &a, &b, &mac));
        assert!(!verify(Some(b"secret"), Role::Connecting, &a, &b, &prove(None, Role::Connecting, &a, &b)));
        assert!(verify(None, Role::Accepting, &a, &b, &prove(None, Role::Accepting, &a, &b)));
    }
}
