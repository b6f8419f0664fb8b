//! The shared secret of connection set-up: each side proves that it has it, over what both have said.
//!
//! HMAC-SHA-256 (RFC 2104) over a label of the role and both introductions, whose nonces make every proof a new one. It
//! keeps strangers and mixed-up deployments out. It does not encrypt, and it does not protect later frames on the wire.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac as _};
use sha2::{Digest, Sha256};

use crate::peers::message::{Introduction, Mac};

/// Which side proves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Connecting,
    Accepting,
}

/// The key of proofs that stands for a secret. HMAC fills short keys up with zeros, so secrets that differ in zeros at their end
/// would be the same key; their hashes differ.
pub(crate) fn hashed(secret: &[u8]) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Hashes labelled parts under a key, each with its length before it.
fn keyed(key: &[u8; 32], label: &[u8], parts: &[&Introduction]) -> Option<Hmac<Sha256>> {
    let mut hmac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    hmac.update(label);
    for part in parts {
        let transcript = part.transcript();
        hmac.update(&(transcript.len() as u64).to_le_bytes());
        hmac.update(&transcript);
    }
    Some(hmac)
}

fn proof(secret: &[u8; 32], role: Role, connecting: &Introduction, accepting: &Introduction) -> Option<Hmac<Sha256>> {
    let label: &[u8] = match role {
        Role::Connecting => b"putget_transfer connecting",
        Role::Accepting => b"putget_transfer accepting ",
    };
    keyed(secret, label, &[connecting, accepting])
}

/// The proof of one side. Without a secret it is all zeros.
pub(crate) fn prove(secret: Option<&[u8; 32]>, role: Role, connecting: &Introduction, accepting: &Introduction) -> Mac {
    secret
        .and_then(|secret| proof(secret, role, connecting, accepting))
        .map_or([0; 32], |hmac| hmac.finalize().into_bytes().into())
}

/// Checks a proof, in constant time.
pub(crate) fn verify(
    secret: Option<&[u8; 32]>,
    role: Role,
    connecting: &Introduction,
    accepting: &Introduction,
    mac: &Mac,
) -> bool {
    match secret {
        None => *mac == [0; 32],
        Some(secret) => proof(secret, role, connecting, accepting).is_some_and(|hmac| hmac.verify_slice(mac).is_ok()),
    }
}

/// How many connections there were with a peer, and how often it was shut out.
pub(crate) type History = (u64, u64);

/// Random numbers of one use: what one key makes of an introduction.
pub(crate) type Answer = [u8; 24];

/// How long answers can be recalled, at least. Twice as long at most.
const RECALL: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Period {
    key: [u8; 32],
    spent: HashSet<u64>,
}

/// Session and nonce for those who say Hello, made from what they say, so that nothing of it has to be kept. Whoever comes back
/// with the same words gets the same numbers, until there is one more connection with it, or it is shut out.
#[derive(Default)]
pub(crate) struct Cookies {
    current: Option<(Period, Instant)>,
    previous: Option<Period>,
}

impl Cookies {
    fn make(key: &[u8; 32], from: &Introduction, (connections, fences): History) -> Option<Answer> {
        let mut hmac = keyed(key, b"putget_transfer answer", &[from])?;
        hmac.update(&connections.to_le_bytes());
        hmac.update(&fences.to_le_bytes());
        let bytes: [u8; 32] = hmac.finalize().into_bytes().into();
        bytes.first_chunk::<24>().copied()
    }

    /// Changes the key in time. What was made with the one before the last is forgotten.
    fn turn(&mut self, now: Instant) {
        match &self.current {
            Some((_, since)) if now.saturating_duration_since(*since) < RECALL => return,
            Some((_, since)) if now.saturating_duration_since(*since) >= 2 * RECALL => self.previous = None,
            Some(_) => self.previous = self.current.take().map(|(period, _)| period),
            None => {}
        }
        let mut period = Period::default();
        self.current = getrandom::fill(&mut period.key).ok().map(|()| (period, now));
    }

    /// The numbers for a Hello after this history with its sender; None without a source of random numbers.
    pub fn answer(&mut self, from: &Introduction, history: History, now: Instant) -> Option<Answer> {
        self.turn(now);
        self.current.as_ref().and_then(|(period, _)| Self::make(&period.key, from, history))
    }

    /// The numbers that may have been given for it lately, after this history.
    pub fn recall(&mut self, from: &Introduction, history: History, now: Instant) -> Vec<Answer> {
        self.turn(now);
        let periods = self.current.iter().map(|(period, _)| period).chain(&self.previous);
        periods.filter_map(|period| Self::make(&period.key, from, history)).collect()
    }

    /// Uses up a session. False if it was used up before.
    pub fn spend(&mut self, session: u64) -> bool {
        let known = self.previous.as_ref().is_some_and(|period| period.spent.contains(&session));
        !known && self.current.as_mut().is_some_and(|(period, _)| period.spent.insert(session))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::doors::Fences;

    fn side(session: u64) -> Introduction {
        Introduction {
            session,
            nonce: [session as u8; 16],
            heartbeat_timeout_ms: 1,
            fences: Fences::default(),
            nics: Vec::new(),
        }
    }

    #[test]
    fn only_the_same_secret_role_and_words_verify() {
        let (a, b) = (side(1), side(2));
        let (secret, other) = (hashed(b"secret"), hashed(b"other"));
        let (secret, other) = (Some(&secret), Some(&other));
        let mac = prove(secret, Role::Connecting, &a, &b);
        assert!(verify(secret, Role::Connecting, &a, &b, &mac));
        assert!(!verify(other, Role::Connecting, &a, &b, &mac));
        assert!(!verify(secret, Role::Accepting, &a, &b, &mac));
        assert!(!verify(secret, Role::Connecting, &b, &a, &mac));
        assert!(!verify(secret, Role::Connecting, &a, &side(3), &mac));
        assert!(!verify(None, Role::Connecting, &a, &b, &mac));
        assert!(!verify(secret, Role::Connecting, &a, &b, &prove(None, Role::Connecting, &a, &b)));
        assert!(verify(None, Role::Accepting, &a, &b, &prove(None, Role::Accepting, &a, &b)));
    }

    #[test]
    fn zeros_at_the_end_of_a_secret_count() {
        let (a, b) = (side(1), side(2));
        let mac = prove(Some(&hashed(b"right")), Role::Connecting, &a, &b);
        assert!(!verify(Some(&hashed(b"right\0")), Role::Connecting, &a, &b, &mac));
    }

    #[test]
    fn the_same_words_get_the_same_numbers_for_a_while_and_once() {
        let (mut cookies, begin) = (Cookies::default(), Instant::now());
        let first = cookies.answer(&side(1), (0, 0), begin).unwrap_or_default();
        assert_ne!(first, [0; 24]);
        assert_eq!(cookies.answer(&side(1), (0, 0), begin), Some(first));
        assert_ne!(cookies.answer(&side(2), (0, 0), begin), Some(first));
        assert_ne!(cookies.answer(&side(1), (1, 0), begin), Some(first));
        assert!(!cookies.recall(&side(1), (1, 0), begin).contains(&first));
        assert!(!cookies.recall(&side(1), (0, 1), begin).contains(&first));
        assert!(cookies.spend(7));
        let later = begin + RECALL;
        assert!(cookies.recall(&side(1), (0, 0), later).contains(&first));
        assert!(!cookies.spend(7) && cookies.spend(8));
        assert!(!cookies.recall(&side(1), (0, 0), later + RECALL).contains(&first));
        assert!(!cookies.recall(&side(1), (0, 0), later + 5 * RECALL).contains(&first));
    }
}
