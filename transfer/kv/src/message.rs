//! Messages between prefillers and decoders. Every reader of these bytes is bounded and refuses what it does not know.

use putget_transfer::{DecodeError, MrDesc};

use crate::codec::{Reader, Result, Writer};
use crate::geometry::{Digest, Geometry};

const MAGIC: [u8; 4] = *b"PTKV";
/// The version of all messages and descriptions. A source of another version is refused when it is read, before any message.
pub(crate) const VERSION: u8 = 1;
const MOST_TEXT: usize = 4096;
const MOST_LISTS: usize = 16_384;
const MOST_PAGES: usize = 1 << 20;
const MOST_SOURCES: usize = 4096;
const MOST_DESC: usize = 65_536;

/// A decoder's first message to a prefiller: both sides' geometry, and the keys of its memory for this prefiller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// All prefill ranks of the group, in the order of the plan.
    pub sources: Vec<Geometry>,
    /// Which of them this prefiller is.
    pub source: u32,
    /// The decoder's cache.
    pub target: Geometry,
    /// The keys of its memory.
    pub memory: Vec<MrDesc>,
    /// The keys of its context slots.
    pub contexts: Option<MrDesc>,
}

impl Hello {
    /// The name of what it says.
    pub fn digest(&self) -> Digest {
        let mut writer = Writer::default();
        self.encode(&mut writer);
        Digest::of(writer.bytes())
    }

    fn encode(&self, writer: &mut Writer) {
        writer.list(&self.sources, |writer, source| source.encode(writer));
        writer.u32(self.source);
        self.target.encode(writer);
        writer.list(&self.memory, |writer, desc| writer.blob(&desc.to_bytes()));
        writer.list(self.contexts.as_slice(), |writer, desc| writer.blob(&desc.to_bytes()));
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let desc = |reader: &mut Reader<'_>| MrDesc::from_bytes(reader.blob(MOST_DESC)?);
        let (sources, source) = (reader.list(MOST_SOURCES, 20, Geometry::decode)?, reader.u32()?);
        let (target, memory) = (Geometry::decode(reader)?, reader.list(MOST_LISTS, 4, desc)?);
        Ok(Self { sources, source, target, memory, contexts: reader.list(1, 4, desc)?.pop() })
    }
}

/// A decoder's request to one prefiller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Tells this attempt from others with the same name.
    pub receive: u64,
    /// The request's name on both sides.
    pub request: String,
    /// The decoder's pool of receives that takes answers.
    pub answers: u32,
    /// How many decode ranks ask for the same request.
    pub num_targets: u32,
    /// Tokens of the prefill.
    pub tokens: u64,
    /// The first one that the decoder does not have.
    pub first_token: u64,
    /// Tokens of a segment.
    pub segment_tokens: u64,
    /// The immediate that the writes raise.
    pub imm: u32,
    /// How often this prefiller will raise it.
    pub count: u64,
    /// Milliseconds from the sending on until the decoder gives up.
    pub deadline_ms: u64,
    /// Bytes in the decoder's context memory before this request's slot.
    pub context_offset: u64,
    /// Which of several holders of a head is taken.
    pub draw: u64,
    /// The decoder's pages, one list for each group.
    pub pages: Vec<Vec<u64>>,
    /// The digest of the Hello that it stands on.
    pub hello: Digest,
    /// The Hello itself, until the prefiller is known to have it.
    pub introduction: Option<Hello>,
}

/// Why a prefiller does not take a request. Nothing of it is ever written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// Model, dtype, layers, heads or sizes differ.
    #[error("the caches differ")]
    Geometry,
    /// Pages, tokens, count or another value is not possible.
    #[error("the request is not possible")]
    Invalid,
    /// The prefill's pages were given back before this request came.
    #[error("the lease of its pages has expired")]
    Expired,
    /// The prefill has failed.
    #[error("the prefill has failed")]
    Failed,
    /// The prefiller takes no new requests.
    #[error("the prefiller is draining")]
    Draining,
    /// It does not know the Hello: it is sent again.
    #[error("the prefiller does not know this decoder")]
    Unknown,
    /// The decoder has cancelled it before it came.
    #[error("it was cancelled before")]
    Cancelled,
    /// It has too many requests.
    #[error("the prefiller has too many requests")]
    Busy,
}

impl Refusal {
    const ALL: [Self; 8] = [
        Self::Geometry,
        Self::Invalid,
        Self::Expired,
        Self::Failed,
        Self::Draining,
        Self::Unknown,
        Self::Cancelled,
        Self::Busy,
    ];
}

/// All messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// A decoder asks.
    Request(Box<Request>),
    /// The prefiller will write.
    Accepted {
        /// Which request.
        receive: u64,
    },
    /// The prefiller will not write, and has not.
    Refused {
        /// Which request.
        receive: u64,
        /// Why.
        refusal: Refusal,
        /// With the values of both sides.
        words: String,
    },
    /// The prefill or a write has failed. All writes of the request have ended.
    Failed {
        /// Which request.
        receive: u64,
        /// Bytes may still land, in spite of all.
        may_land: bool,
        /// Why.
        words: String,
    },
    /// The decoder wants its pages back. It may overtake its Request, which then never starts.
    Cancel {
        /// Which request.
        receive: u64,
        /// As in the Request.
        answers: u32,
    },
    /// Every write of the request has ended.
    Cancelled {
        /// Which request.
        receive: u64,
        /// Bytes may still land, in spite of all.
        may_land: bool,
    },
    /// The decoder will ask for this one: its pages are kept for another lease.
    Renew {
        /// The request's name.
        request: String,
    },
}

impl Message {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.raw(&MAGIC);
        writer.u8(VERSION);
        match self {
            Self::Request(request) => {
                writer.u8(0);
                request.encode(&mut writer);
            }
            Self::Accepted { receive } => {
                writer.u8(1);
                writer.u64(*receive);
            }
            Self::Refused { receive, refusal, words } => {
                writer.u8(2);
                writer.u64(*receive);
                writer.u8(Refusal::ALL.iter().position(|other| other == refusal).unwrap_or(0) as u8);
                writer.text(shortened(words));
            }
            Self::Failed { receive, may_land, words } => {
                writer.u8(3);
                writer.u64(*receive);
                writer.u8((*may_land).into());
                writer.text(shortened(words));
            }
            Self::Cancel { receive, answers } => {
                writer.u8(4);
                writer.u64(*receive);
                writer.u32(*answers);
            }
            Self::Cancelled { receive, may_land } => {
                writer.u8(5);
                writer.u64(*receive);
                writer.u8((*may_land).into());
            }
            Self::Renew { request } => {
                writer.u8(6);
                writer.text(request);
            }
        }
        writer.finish()
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`DecodeError`] for anything but the bytes of a message.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(DecodeError::Magic);
        }
        match reader.u8()? {
            VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let message = match reader.u8()? {
            0 => Self::Request(Box::new(Request::decode(&mut reader)?)),
            1 => Self::Accepted { receive: reader.u64()? },
            2 => {
                let (receive, code) = (reader.u64()?, reader.u8()?);
                let refusal = Refusal::ALL.get(usize::from(code)).ok_or(DecodeError::Value("refusal"))?;
                Self::Refused { receive, refusal: *refusal, words: reader.text(MOST_TEXT)? }
            }
            3 => Self::Failed { receive: reader.u64()?, may_land: reader.flag()?, words: reader.text(MOST_TEXT)? },
            4 => Self::Cancel { receive: reader.u64()?, answers: reader.u32()? },
            5 => Self::Cancelled { receive: reader.u64()?, may_land: reader.flag()? },
            6 => Self::Renew { request: reader.text(MOST_TEXT)? },
            _ => return Err(DecodeError::Value("message")),
        };
        reader.end()?;
        Ok(message)
    }
}

/// Words that fit into a message.
fn shortened(words: &str) -> &str {
    let end = (0..=MOST_TEXT.min(words.len())).rev().find(|end| words.is_char_boundary(*end));
    words.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// The longest name of a request, in bytes.
pub(crate) const MOST_NAME: usize = MOST_TEXT;

impl Request {
    fn encode(&self, writer: &mut Writer) {
        writer.u64(self.receive);
        writer.text(&self.request);
        writer.u32(self.answers);
        writer.u32(self.num_targets);
        for value in [self.tokens, self.first_token, self.segment_tokens, self.count, self.deadline_ms] {
            writer.u64(value);
        }
        writer.u32(self.imm);
        writer.u64(self.context_offset);
        writer.u64(self.draw);
        writer.list(&self.pages, |writer, list| writer.list(list, |writer, page| writer.u64(*page)));
        writer.raw(&self.hello.0);
        writer.list(self.introduction.as_slice(), |writer, hello| hello.encode(writer));
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let (receive, request) = (reader.u64()?, reader.text(MOST_TEXT)?);
        let (answers, num_targets) = (reader.u32()?, reader.u32()?);
        let (tokens, first_token, segment_tokens) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (count, deadline_ms) = (reader.u64()?, reader.u64()?);
        let (imm, context_offset, draw) = (reader.u32()?, reader.u64()?, reader.u64()?);
        let pages = reader.list(MOST_LISTS, 4, |reader| reader.list(MOST_PAGES, 8, Reader::u64))?;
        let hello = Digest(reader.array()?);
        let introduction = reader.list(1, 28, Hello::decode)?.pop();
        Ok(Self {
            receive,
            request,
            answers,
            num_targets,
            tokens,
            first_token,
            segment_tokens,
            imm,
            count,
            deadline_ms,
            context_offset,
            draw,
            pages,
            hello,
            introduction,
        })
    }
}
