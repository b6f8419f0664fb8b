//! Where the bytes of a KV cache lie: regions, their pages, and the heads that one rank holds.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use putget_transfer::{DecodeError, Error};
use sha2::{Digest as _, Sha256};

use crate::codec::{Reader, Result as Decoded, Writer};

/// More than any model has: bounds what a hostile description can ask for.
const MOST_REGIONS: usize = 16_384;
const MOST_PAGE_TOKENS: u32 = 1 << 20;
const MOST_HEADS: u32 = 1 << 16;
/// The word that says how far a step is has 16 bits for the number of layers that are done.
const LAST_LAYER: u32 = u16::MAX as u32 - 1;
/// A request has one list of pages for each group, and for each number below the highest.
const LAST_GROUP: u32 = MOST_REGIONS as u32 - 1;

/// The order of a cache's dimensions, outermost first: layers (L), pages (B), heads (H), tokens of a page (N), and the bytes of one
/// head's token (C), keys and values side by side. The names are vLLM's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the letters are the documentation")]
pub enum Layout {
    Lbhnc,
    Lbnhc,
    Lhbnc,
    Blhnc,
    Blnhc,
    Bhlnc,
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// Its letters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// The layout of these letters.
    ///
    /// # Errors
    /// [`Error::Argument`] for letters of no layout.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let unknown = || Error::argument("layout", format!("{name:?} came; {} are allowed", names()));
        Self::ALL.into_iter().find(|layout| layout.name() == name).ok_or_else(unknown)
    }

    /// The strides in bytes of layers, pages, heads and tokens in one tensor of this layout.
    pub fn strides(self, layers: u64, pages: u64, heads: u64, page_tokens: u64, head_bytes: u64) -> [u64; 4] {
        let size = |dimension| match dimension {
            'L' => layers,
            'B' => pages,
            'H' => heads,
            _ => page_tokens,
        };
        let mut strides = [0; 4];
        let mut stride = head_bytes;
        for dimension in self.name().chars().rev().skip(1) {
            let at = match dimension {
                'L' => 0,
                'B' => 1,
                'H' => 2,
                _ => 3,
            };
            if let Some(slot) = strides.get_mut(at) {
                *slot = stride;
            }
            stride = stride.saturating_mul(size(dimension));
        }
        strides
    }
}

/// How a region's pages follow from a request's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every token has a place.
    Tokens,
    /// The last so many tokens of a request have a place: sliding windows.
    Window(u32),
    /// One page a request, whatever its length: linear attention, convolutions. It moves once, when the prefill is over.
    State,
}

/// One layer's part of a cache, as one rank holds it. The byte of page `p`, plane `k`, token `t` and head `h` (counted from the
/// rank's first) is at `offset + p * page_stride + k * plane_stride + t * token_stride + h * head_stride`, and `head_bytes` follow.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// The name by which both sides know it.
    pub name: String,
    /// Its place in the order in which the rank computes layers, from 0 on. Several regions may belong to one layer.
    pub layer: u32,
    /// How its pages follow from tokens.
    pub kind: Kind,
    /// The list of a request's pages that it uses: caches of one size share a list.
    pub group: u32,
    /// The registered memory that it lies in, by its place in the cache's list.
    pub memory: u32,
    /// Bytes in that memory before page 0.
    pub offset: u64,
    /// How many pages it has.
    pub num_pages: u64,
    /// Tokens of a page; 1 for a state.
    pub page_tokens: u32,
    /// 2 where keys and values lie apart, otherwise 1.
    pub planes: u32,
    /// Heads of the whole model, 1 for a latent cache (MLA).
    pub num_heads: u32,
    /// Those that this rank holds.
    pub heads: Range<u32>,
    /// Bytes of one head's token in one plane.
    pub head_bytes: u64,
    /// Bytes from one page to the next.
    pub page_stride: u64,
    /// Bytes from keys to values.
    pub plane_stride: u64,
    /// Bytes from one token to the next.
    pub token_stride: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// A page moves as a whole, as soon as its last token is computed: tokens have no places of their own in it.
    pub whole: bool,
}

impl Region {
    /// Heads that the rank holds.
    pub fn num_held(&self) -> u32 {
        self.heads.end.saturating_sub(self.heads.start)
    }

    /// The tokens of a request of `tokens` that have a place, where the target has the first `first` already.
    pub fn tokens(&self, first: u64, tokens: u64) -> Range<u64> {
        match self.kind {
            Kind::Tokens => first..tokens.max(first),
            Kind::Window(window) => first.max(tokens.saturating_sub(u64::from(window)))..tokens.max(first),
            Kind::State => 0..1,
        }
    }

    /// The pages of those tokens, counted from the request's beginning.
    pub fn pages(&self, first: u64, tokens: u64) -> Range<u64> {
        let Range { start, end } = self.tokens(first, tokens);
        let page = u64::from(self.page_tokens).max(1);
        if start >= end { 0..0 } else { start / page..end.div_ceil(page) }
    }

    /// Where the bytes of a place begin in the region's memory. It has been checked that they do not leave it.
    pub(crate) fn at(&self, page: u64, plane: u64, token: u64, head: u64) -> u64 {
        self.offset
            + page * self.page_stride
            + plane * self.plane_stride
            + token * self.token_stride
            + head * self.head_stride
    }

    /// The first byte behind the region's last one; None if that does not fit into 64 bits.
    fn end(&self) -> Option<u64> {
        let far = |count: u64, stride: u64| count.checked_sub(1)?.checked_mul(stride);
        let mut end = self.offset.checked_add(self.head_bytes)?;
        for (count, stride) in self.dimensions().into_iter().chain([(self.num_pages, self.page_stride)]) {
            end = end.checked_add(far(count, stride)?)?;
        }
        Some(end)
    }

    /// Sizes and strides of what a page has: planes, tokens and heads.
    pub(crate) fn dimensions(&self) -> [(u64, u64); 3] {
        [
            (u64::from(self.planes), self.plane_stride),
            (u64::from(self.page_tokens), self.token_stride),
            (u64::from(self.num_held()), self.head_stride),
        ]
    }

    fn check(&self, memory: &[u64]) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::argument("regions", format!("{:?}: {problem}", self.name)));
        if self.name.is_empty() || self.name.len() > 4096 {
            return bad(format!("a name of {} bytes came; 1 to 4096 are allowed", self.name.len()));
        }
        if self.layer > LAST_LAYER || self.group > LAST_GROUP {
            let allowed = format!("layers 0 to {LAST_LAYER} and groups 0 to {LAST_GROUP} are allowed");
            return bad(format!("layer {}, group {} came; {allowed}", self.layer, self.group));
        }
        let state = self.kind == Kind::State;
        if self.page_tokens == 0 || self.page_tokens > MOST_PAGE_TOKENS || state && self.page_tokens != 1 {
            let allowed = if state { "a state has 1".into() } else { format!("1 to {MOST_PAGE_TOKENS} are allowed") };
            return bad(format!("page_tokens {} came; {allowed}", self.page_tokens));
        }
        if self.kind == Kind::Window(0) {
            return bad("a window of 0 tokens came; at least 1 is needed".into());
        }
        if !(1..=2).contains(&self.planes) {
            return bad(format!("planes {} came; 1 or 2 are allowed", self.planes));
        }
        let Range { start, end } = self.heads;
        if start >= end || end > self.num_heads || self.num_heads > MOST_HEADS {
            return bad(format!(
                "heads {start} to {end} of {} came; some of at most {MOST_HEADS} are needed",
                self.num_heads
            ));
        }
        if self.head_bytes == 0 || self.num_pages == 0 {
            return bad(format!("head_bytes {}, num_pages {} came; neither may be 0", self.head_bytes, self.num_pages));
        }
        let Some(&len) = memory.get(self.memory as usize) else {
            return bad(format!("memory {} came; there are {}", self.memory, memory.len()));
        };
        if self.end().is_none_or(|end| end > len) {
            return bad(format!("its last byte is outside of memory {}, which has {len} bytes", self.memory));
        }
        self.check_apart().or_else(bad)
    }

    /// No two places of a region share a byte: each dimension's stride spans all smaller ones.
    fn check_apart(&self) -> Result<(), String> {
        let mut sorted: Vec<_> = self.dimensions().into_iter().chain([(self.num_pages, self.page_stride)]).collect();
        sorted.retain(|(count, _)| *count > 1);
        sorted.sort_unstable_by_key(|(_, stride)| *stride);
        let mut span = self.head_bytes;
        for (count, stride) in sorted {
            if stride < span {
                return Err(format!("a stride of {stride} bytes came where {span} bytes lie: places would overlap"));
            }
            span = span.saturating_add((count - 1).saturating_mul(stride));
        }
        Ok(())
    }

    /// The facts that both sides must have in common.
    fn shared(&self, writer: &mut Writer) {
        writer.text(&self.name);
        match self.kind {
            Kind::Tokens => writer.u32(0),
            Kind::Window(window) => writer.u32(window),
            Kind::State => writer.u32(u32::MAX),
        }
        writer.u32(self.planes);
        writer.u32(u32::from(self.whole));
        writer.u32(self.num_heads);
        writer.u64(self.head_bytes);
    }

    fn encode(&self, writer: &mut Writer) {
        self.shared(writer);
        for value in [self.layer, self.group, self.memory, self.page_tokens, self.heads.start, self.heads.end] {
            writer.u32(value);
        }
        let strides = [self.page_stride, self.plane_stride, self.token_stride, self.head_stride];
        for value in [self.offset, self.num_pages].into_iter().chain(strides) {
            writer.u64(value);
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Decoded<Self> {
        let name = reader.text(4096)?;
        let kind = match reader.u32()? {
            0 => Kind::Tokens,
            u32::MAX => Kind::State,
            window => Kind::Window(window),
        };
        let planes = reader.u32()?;
        let whole = match reader.u32()? {
            0 => false,
            1 => true,
            _ => return Err(DecodeError::Value("flag")),
        };
        let (num_heads, head_bytes) = (reader.u32()?, reader.u64()?);
        let (layer, group, memory, page_tokens) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
        let heads = reader.u32()?..reader.u32()?;
        let (offset, num_pages) = (reader.u64()?, reader.u64()?);
        let (page_stride, plane_stride) = (reader.u64()?, reader.u64()?);
        let (token_stride, head_stride) = (reader.u64()?, reader.u64()?);
        Ok(Self {
            name,
            layer,
            kind,
            group,
            memory,
            offset,
            num_pages,
            page_tokens,
            planes,
            num_heads,
            heads,
            head_bytes,
            page_stride,
            plane_stride,
            token_stride,
            head_stride,
            whole,
        })
    }
}

/// 32 bytes that differ where what they stand for does.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// The cache of one rank: its regions, and which rank it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Further facts that both sides must have in common: model, dtype, version.
    pub model: String,
    /// The rank inside its tensor-parallel group.
    pub rank: u32,
    /// Bytes of each registered memory.
    pub memory: Vec<u64>,
    /// Its regions, in the order in which the rank computes their layers.
    pub regions: Vec<Region>,
    /// Bytes of a request's context: hidden state, logits, first token. 0: none travels.
    pub context_bytes: u64,
}

impl Geometry {
    /// Checks that the regions lie inside their memory, do not share places, and are told apart by name.
    ///
    /// # Errors
    /// [`Error::Argument`] that names the region and the value.
    pub fn check(&self) -> Result<(), Error> {
        if self.regions.is_empty() || self.regions.len() > MOST_REGIONS {
            let problem = format!("{} came; 1 to {MOST_REGIONS} are allowed", self.regions.len());
            return Err(Error::argument("regions", problem));
        }
        self.regions.iter().try_for_each(|region| region.check(&self.memory))?;
        let mut names = HashSet::new();
        if let Some(twice) = self.regions.iter().find(|region| !names.insert(region.name.as_str())) {
            return Err(Error::argument("regions", format!("{:?} came twice; names tell regions apart", twice.name)));
        }
        let layers = |pair: &[Region]| matches!(pair, [a, b] if a.layer > b.layer);
        if let Some([_, late]) = self.regions.windows(2).find(|pair| layers(pair)) {
            let problem = format!("{:?} of layer {} came too late; layers ascend", late.name, late.layer);
            return Err(Error::argument("regions", problem));
        }
        for region in &self.regions {
            let other = self.regions.iter().find(|other| other.group == region.group);
            if other.is_some_and(|other| (other.kind, other.page_tokens) != (region.kind, region.page_tokens)) {
                let problem = format!("{:?} shares pages of group {} with another size", region.name, region.group);
                return Err(Error::argument("regions", problem));
            }
        }
        Ok(())
    }

    /// How many lists of pages a request has.
    pub fn num_groups(&self) -> usize {
        self.regions.iter().map(|region| region.group as usize + 1).max().unwrap_or(0)
    }

    /// A region of a list of pages, which stands for all of them.
    pub(crate) fn of_group(&self, group: usize) -> Option<&Region> {
        self.regions.iter().find(|region| region.group as usize == group)
    }

    /// Checks a request's pages: one list for each group, as long as its tokens need, each page inside and named once.
    ///
    /// # Errors
    /// [`Error::Argument`] with what came and what is allowed.
    pub fn check_pages(&self, first: u64, tokens: u64, pages: &[Vec<u64>]) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::argument("pages", problem));
        if pages.len() != self.num_groups() {
            return bad(format!("{} lists came; {} are needed", pages.len(), self.num_groups()));
        }
        for (group, list) in pages.iter().enumerate() {
            let Some(region) = self.of_group(group) else { continue };
            let Range { start, end } = region.pages(first, tokens);
            if list.len() as u64 != end - start {
                return bad(format!(
                    "list {group} has {}; tokens {first} to {tokens} need {}",
                    list.len(),
                    end - start
                ));
            }
            let own = self.regions.iter().filter(|region| region.group as usize == group);
            let most = own.map(|region| region.num_pages).min().unwrap_or(0);
            if let Some(page) = list.iter().find(|page| **page >= most) {
                return bad(format!("page {page} of list {group} came; there are {most}"));
            }
            let mut seen = HashSet::with_capacity(list.len());
            if let Some(page) = list.iter().find(|page| !seen.insert(**page)) {
                return bad(format!("page {page} of list {group} came twice"));
            }
        }
        Ok(())
    }

    /// The digest of all of it: equal digests are equal geometries.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        self.encode(&mut writer);
        writer.finish()
    }

    /// Reads one. It is not checked yet.
    ///
    /// # Errors
    /// [`DecodeError`] for anything but the bytes of a geometry.
    pub fn from_bytes(bytes: &[u8]) -> Decoded<Self> {
        let mut reader = Reader::new(bytes);
        let geometry = Self::decode(&mut reader)?;
        reader.end()?;
        Ok(geometry)
    }

    pub(crate) fn encode(&self, writer: &mut Writer) {
        writer.text(&self.model);
        writer.u32(self.rank);
        writer.u64(self.context_bytes);
        writer.list(&self.memory, |writer, len| writer.u64(*len));
        writer.list(&self.regions, |writer, region| region.encode(writer));
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Decoded<Self> {
        let (model, rank, context_bytes) = (reader.text(65_536)?, reader.u32()?, reader.u64()?);
        let memory = reader.list(MOST_REGIONS, 8, Reader::u64)?;
        let regions = reader.list(MOST_REGIONS, 100, Region::decode)?;
        Ok(Self { model, rank, memory, regions, context_bytes })
    }

    /// One line for each region.
    pub fn describe(&self) -> String {
        let mut text = format!("{} rank {} digest {}\n", self.model, self.rank, self.digest());
        for region in &self.regions {
            let Region { name, layer, kind, num_pages, page_tokens, planes, num_heads, heads, head_bytes, .. } = region;
            let kind = match kind {
                Kind::Tokens => format!("{num_pages} pages of {page_tokens} tokens"),
                Kind::Window(window) => format!("{num_pages} pages of {page_tokens} tokens, window {window}"),
                Kind::State => format!("{num_pages} states"),
            };
            let heads = format!("heads {} to {} of {num_heads}", heads.start, heads.end);
            text += &format!("  layer {layer} {name}: {kind}, {heads}, {planes} x {head_bytes} bytes\n");
        }
        text
    }
}
