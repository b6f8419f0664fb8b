//! The bytes of a request that each source writes: a pure function of both sides' geometry and the request, so that both sides know
//! it without a message.
//!
//! The unit of counting is the *portion*: the bytes of one segment of tokens and of some layers, from one source. Each raises the
//! target's counter by one. Segments are fixed in the request and layers are grouped by their bytes, so the count does not depend on
//! how the prefill cuts its work into steps.

use std::collections::HashMap;
use std::ops::Range;

use putget_transfer::Error;
use sha2::{Digest as _, Sha256};

use crate::geometry::{Geometry, Kind, Region};

/// Layers are put together until a portion has this many bytes: smaller ones cost more in notifications than they save in waiting.
const PORTION_BYTES: u64 = 1 << 20;

/// Steps of a plan, far more than any model needs: bounds what a hostile description can cost.
const MOST_STEPS: u64 = 1 << 24;

/// A decoder's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask<'a> {
    /// The request's name on both sides.
    pub request: &'a str,
    /// How many tokens the prefill computes.
    pub tokens: u64,
    /// The first token that the target does not have.
    pub first_token: u64,
    /// Tokens of a segment: what is sent as soon as it is computed. Segments begin at its multiples.
    pub segment_tokens: u64,
}

impl Ask<'_> {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.tokens == 0 || self.tokens > 1 << 40 {
            return Err(Error::argument("tokens", format!("{} came; 1 to 2^40 are allowed", self.tokens)));
        }
        if self.first_token > self.tokens {
            let problem = format!("{} came; 0 to {} are allowed", self.first_token, self.tokens);
            return Err(Error::argument("first_token", problem));
        }
        if self.segment_tokens == 0 || (self.tokens - self.first_token) / self.segment_tokens > 1 << 20 {
            let problem = format!("{} came; at least 1 and at most 2^20 segments are allowed", self.segment_tokens);
            return Err(Error::argument("segment_tokens", problem));
        }
        Ok(())
    }
}

/// One write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The source's memory, and where in it the bytes begin.
    pub src: (u32, u64),
    /// The target's memory, and where in it they go.
    pub dst: (u32, u64),
    /// Bytes.
    pub len: u64,
}

/// Heads of a region that go from one source to the target.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    source: usize,
    target: usize,
    heads: Range<u32>,
    layer: u32,
}

/// The unit that raises the target's counter by one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// Tokens that must have been computed; those of a state: all.
    pub tokens: Range<u64>,
    /// Layers of the source that must have computed them: all below this one.
    pub layers: u32,
    /// It leaves when the prefill is over.
    pub at_end: bool,
    /// Bytes.
    pub num_bytes: u64,
    /// Writes.
    pub num_writes: u64,
    spans: Range<usize>,
}

/// The portions that one source sends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourcePlan {
    /// How often it raises the target's counter.
    pub count: u64,
    /// Bytes of pages and states; the context comes on top.
    pub num_bytes: u64,
    /// Writes of pages and states.
    pub num_writes: u64,
    /// It sends the context, too.
    pub context: bool,
    /// In the order in which they can leave.
    pub portions: Vec<Portion>,
    spans: Vec<Span>,
}

/// The portions that all sources of one target send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The count that the target waits for.
    pub count: u64,
    /// Bytes of pages and states.
    pub num_bytes: u64,
    /// Writes of pages and states.
    pub num_writes: u64,
    sources: Vec<SourcePlan>,
}

/// Plans a request that no decoder has asked for. A head that several sources hold is taken from one of them, drawn from the request's
/// name. A decoder draws by what it has asked each source for: see [`plan_drawn`].
///
/// # Errors
/// [`Error::Argument`] if tokens or segment are out of range, if the sides differ in what they must share, or if no source holds
/// a head that the target has. It names the region, and both values.
pub fn plan(sources: &[Geometry], target: &Geometry, ask: &Ask<'_>) -> Result<Plan, Error> {
    plan_drawn(sources, target, ask, drawn(ask.request))
}

/// As [`plan`], with a number that says which of several holders of a head is taken: [`crate::Receive::draw`] of a decoder's request.
///
/// # Errors
/// As [`plan`].
pub fn plan_drawn(sources: &[Geometry], target: &Geometry, ask: &Ask<'_>, draw: u64) -> Result<Plan, Error> {
    ask.check()?;
    if sources.is_empty() {
        return Err(Error::argument("sources", "none came; at least 1 is needed"));
    }
    for source in sources {
        check_shared(source, target)?;
    }
    let mut plans: Vec<_> = sources.iter().map(|_| SourcePlan::default()).collect();
    let holders = holders(sources);
    let of = |region: &Region| holders.get(region.name.as_str()).map_or(0, Vec::len) as u64;
    let heads = target.regions.iter().map(|region| u64::from(region.num_held()) * of(region));
    check_steps("sources", heads.fold(0, u64::saturating_add))?;
    for (at, region) in target.regions.iter().enumerate() {
        let found = holders.get(region.name.as_str()).map(Vec::as_slice).unwrap_or_default();
        assign(found, region, at, draw.wrapping_add(u64::from(target.rank)), &mut plans)?;
    }
    let segments = (ask.tokens - ask.first_token) / ask.segment_tokens + 2;
    let spans: usize = plans.iter().map(|plan| plan.spans.len()).sum();
    check_steps("segment_tokens", segments.saturating_mul(spans as u64))?;
    for (source, plan) in sources.iter().zip(&mut plans) {
        plan.spans.sort_by_key(|span| (span.layer, span.source, span.heads.start));
        plan.cut(source, target, ask);
    }
    if target.context_bytes > 0 {
        // Those that hold the last layers have what comes after them.
        let last = target.regions.last().and_then(|region| holders.get(region.name.as_str()));
        let last: Vec<_> = last.into_iter().flatten().map(|(index, ..)| *index).collect();
        let index = last.get((draw % last.len().max(1) as u64) as usize).copied().unwrap_or_default();
        if let Some(plan) = plans.get_mut(index) {
            plan.context = true;
            plan.count += 1;
        }
    }
    let sum = |get: fn(&SourcePlan) -> u64| plans.iter().map(get).fold(0, u64::saturating_add);
    let (count, num_bytes, num_writes) =
        (sum(|plan| plan.count), sum(|plan| plan.num_bytes), sum(|plan| plan.num_writes));
    Ok(Plan { count, num_bytes, num_writes, sources: plans })
}

fn check_steps(argument: &'static str, steps: u64) -> Result<(), Error> {
    if steps > MOST_STEPS {
        let problem = format!("a plan of {steps} steps came; at most {MOST_STEPS} are allowed");
        return Err(Error::argument(argument, problem));
    }
    Ok(())
}

/// A number that everybody draws from a request's name.
fn drawn(request: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(request.as_bytes()).into();
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The portions that a decoder has asked of the sources of a group, by the number that said which of several holders is taken.
#[derive(Debug, Default)]
pub(crate) struct Loads(Vec<u64>);

impl Loads {
    /// The number with the least load, and of several the first one after that of the request's name: decode ranks that ask for the
    /// same requests draw the same, and their ranks then lead them to different holders.
    pub fn draw(&mut self, request: &str, sources: usize) -> u64 {
        self.0.resize(sources.max(1), 0);
        let first = (drawn(request) % self.0.len() as u64) as usize;
        let (before, from) = self.0.split_at(first);
        let order = from.iter().chain(before).zip((first..self.0.len()).chain(0..first));
        order.min_by_key(|(load, _)| **load).map_or(0, |(_, at)| at as u64)
    }

    /// Adds the bytes of a request.
    pub fn add(&mut self, draw: u64, bytes: u64) {
        self.0.iter_mut().skip(draw as usize).take(1).for_each(|load| *load = load.saturating_add(bytes));
    }
}

type Holders<'a> = HashMap<&'a str, Vec<(usize, usize, &'a Region)>>;

/// The sources that hold each region: which, and where in their lists.
fn holders(sources: &[Geometry]) -> Holders<'_> {
    let mut holders: Holders<'_> = HashMap::new();
    for (index, source) in sources.iter().enumerate() {
        for (at, region) in source.regions.iter().enumerate() {
            holders.entry(region.name.as_str()).or_default().push((index, at, region));
        }
    }
    holders
}

fn check_shared(source: &Geometry, target: &Geometry) -> Result<(), Error> {
    let differ = |what: &str, source: &str, target: &str| {
        Err(Error::argument("sources", format!("{what}: the source has {source}, the target {target}")))
    };
    if source.model != target.model {
        return differ("model", &source.model, &target.model);
    }
    if source.context_bytes != target.context_bytes {
        let sizes = (source.context_bytes.to_string(), target.context_bytes.to_string());
        return differ("context_bytes", &sizes.0, &sizes.1);
    }
    let own: HashMap<_, _> = target.regions.iter().map(|region| (region.name.as_str(), region)).collect();
    for region in &source.regions {
        let Some(other) = own.get(region.name.as_str()) else { continue };
        let shared = |region: &Region| {
            let Region { kind, planes, num_heads, head_bytes, page_tokens, .. } = region;
            let whole = if region.whole { format!(", whole pages of {page_tokens} tokens") } else { String::new() };
            format!("{kind:?}, {planes} planes, {num_heads} heads of {head_bytes} bytes{whole}")
        };
        let (theirs, ours) = (shared(region), shared(other));
        if theirs != ours {
            return differ(&region.name, &theirs, &ours);
        }
    }
    Ok(())
}

/// Gives each head of a target's region to one of the sources that hold it.
fn assign(
    holders: &[(usize, usize, &Region)],
    region: &Region,
    at: usize,
    draw: u64,
    plans: &mut [SourcePlan],
) -> Result<(), Error> {
    for head in region.heads.clone() {
        let candidates: Vec<_> = holders.iter().filter(|(.., held)| held.heads.contains(&head)).collect();
        let chosen = candidates.get((draw % candidates.len().max(1) as u64) as usize);
        let Some((index, source, held)) = chosen else {
            let problem = format!("{:?}: no source holds head {head}", region.name);
            return Err(Error::argument("sources", problem));
        };
        let Some(plan) = plans.get_mut(*index) else { continue };
        match plan.spans.last_mut() {
            Some(span) if span.target == at && span.source == *source && span.heads.end == head => span.heads.end += 1,
            _ => plan.spans.push(Span { source: *source, target: at, heads: head..head + 1, layer: held.layer }),
        }
    }
    Ok(())
}

/// The tokens of those pages of `own` whose last token lies in a segment.
fn whole_pages(page: u64, own: &Range<u64>, segment: &Range<u64>) -> Range<u64> {
    if own.is_empty() {
        return own.clone();
    }
    let complete = |end: u64| if end >= own.end { own.end.next_multiple_of(page) } else { end / page * page };
    let start = if segment.start <= own.start { own.start / page * page } else { complete(segment.start) };
    start..complete(segment.end)
}

/// Tokens that lie in one page on either side.
struct Piece {
    /// Page of the request and token in it.
    src: (u64, u64),
    dst: (u64, u64),
    tokens: u64,
}

fn pieces(source: &Region, target: &Region, tokens: Range<u64>) -> impl Iterator<Item = Piece> {
    let (from, to) = (u64::from(source.page_tokens), u64::from(target.page_tokens));
    let mut next = tokens.start;
    std::iter::from_fn(move || {
        let start = next;
        if start >= tokens.end {
            return None;
        }
        next = tokens.end.min((start / from + 1) * from).min((start / to + 1) * to);
        Some(Piece { src: (start / from, start % from), dst: (start / to, start % to), tokens: next - start })
    })
}

/// One dimension of a piece: how many places, and their strides on both sides.
#[derive(Clone, Copy)]
struct Dimension {
    count: u64,
    src: u64,
    dst: u64,
}

/// Writes of one piece: bytes that lie together on both sides, and the dimensions over which they repeat.
struct Runs {
    len: u64,
    repeated: [Dimension; 3],
}

impl Runs {
    fn of(source: &Region, target: &Region, heads: u64, tokens: u64) -> Self {
        let mut dimensions = [
            Dimension { count: u64::from(source.planes), src: source.plane_stride, dst: target.plane_stride },
            Dimension { count: tokens, src: source.token_stride, dst: target.token_stride },
            Dimension { count: heads, src: source.head_stride, dst: target.head_stride },
        ];
        let unit = Dimension { count: 1, src: 0, dst: 0 };
        dimensions.sort_unstable_by_key(|dimension| dimension.src);
        let mut len = source.head_bytes;
        for dimension in dimensions.iter_mut().filter(|dimension| dimension.count > 1) {
            if (dimension.src, dimension.dst) != (len, len) {
                break;
            }
            len *= dimension.count;
            *dimension = unit;
        }
        Self { len, repeated: dimensions }
    }

    fn count(&self) -> u64 {
        self.repeated.iter().map(|dimension| dimension.count).product()
    }

    /// Where each begins, relative to the piece's first byte on both sides.
    fn offsets(&self) -> impl Iterator<Item = (u64, u64)> {
        let [a, b, c] = self.repeated;
        (0..c.count).flat_map(move |k| {
            (0..b.count).flat_map(move |j| {
                (0..a.count).map(move |i| (i * a.src + j * b.src + k * c.src, i * a.dst + j * b.dst + k * c.dst))
            })
        })
    }
}

impl SourcePlan {
    /// Cuts what the source sends into portions.
    fn cut(&mut self, source: &Geometry, target: &Geometry, ask: &Ask<'_>) {
        let size = ask.segment_tokens;
        for segment in ask.first_token / size..ask.tokens.div_ceil(size) {
            let tokens = (segment * size).max(ask.first_token)..((segment + 1) * size).min(ask.tokens);
            self.group(source, target, ask, &tokens, false);
        }
        self.group(source, target, ask, &(0..ask.tokens), true);
        self.count = self.portions.len() as u64;
        let sum = |get: fn(&Portion) -> u64| self.portions.iter().map(get).fold(0, u64::saturating_add);
        (self.num_bytes, self.num_writes) = (sum(|portion| portion.num_bytes), sum(|portion| portion.num_writes));
    }

    /// Puts layers together until there is enough for a portion. States make one at the end.
    fn group(&mut self, source: &Geometry, target: &Geometry, ask: &Ask<'_>, tokens: &Range<u64>, at_end: bool) {
        let empty = |start: usize| Portion {
            tokens: tokens.clone(),
            layers: 0,
            at_end,
            num_bytes: 0,
            num_writes: 0,
            spans: start..start,
        };
        let mut portion = empty(0);
        for (at, span) in self.spans.iter().enumerate() {
            let full = portion.num_bytes >= PORTION_BYTES && portion.layers <= span.layer;
            if full && !at_end {
                self.portions.push(std::mem::replace(&mut portion, empty(at)));
            }
            let (bytes, writes) = span.size(source, target, ask, tokens, at_end);
            portion.num_bytes = portion.num_bytes.saturating_add(bytes);
            portion.num_writes = portion.num_writes.saturating_add(writes);
            portion.spans.end = at + 1;
            portion.layers = span.layer + 1;
        }
        if portion.num_bytes > 0 {
            self.portions.push(portion);
        }
    }

    /// The writes of one of its portions, with the pages of both sides: `pages.0` has, for each list of the source, a page for every
    /// page of tokens from the request's beginning; `pages.1` is what the target has asked for. Both have been checked.
    pub fn writes(
        &self,
        portion: &Portion,
        (source, target): (&Geometry, &Geometry),
        ask: &Ask<'_>,
        pages: (&[Vec<u64>], &[Vec<u64>]),
    ) -> Vec<Write> {
        let mut writes = Vec::with_capacity(portion.num_writes as usize);
        for span in self.spans.get(portion.spans.clone()).unwrap_or_default() {
            span.write(source, target, (ask, portion), pages, &mut writes);
        }
        writes
    }
}

impl Span {
    /// Both regions, and those of the tokens that have a place in them.
    fn part<'a>(
        &self,
        source: &'a Geometry,
        target: &'a Geometry,
        ask: &Ask<'_>,
        tokens: &Range<u64>,
        at_end: bool,
    ) -> Option<(&'a Region, &'a Region, Range<u64>)> {
        let (source, target) = (source.regions.get(self.source)?, target.regions.get(self.target)?);
        let own = target.tokens(ask.first_token, ask.tokens);
        if target.kind == Kind::State {
            return at_end.then_some((source, target, own));
        }
        let part = if target.whole {
            whole_pages(target.page_tokens.into(), &own, tokens)
        } else {
            own.start.max(tokens.start)..own.end.min(tokens.end)
        };
        (!at_end && part.start < part.end).then_some((source, target, part))
    }

    fn num_heads(&self) -> u64 {
        u64::from(self.heads.end - self.heads.start)
    }

    /// Bytes and writes.
    fn size(
        &self,
        source: &Geometry,
        target: &Geometry,
        ask: &Ask<'_>,
        tokens: &Range<u64>,
        at_end: bool,
    ) -> (u64, u64) {
        let Some((source, target, part)) = self.part(source, target, ask, tokens, at_end) else { return (0, 0) };
        let row = (self.num_heads() * u64::from(source.planes)).saturating_mul(source.head_bytes);
        let bytes = (part.end - part.start).saturating_mul(row);
        let runs = |piece: Piece| Runs::of(source, target, self.num_heads(), piece.tokens).count();
        (bytes, pieces(source, target, part).map(runs).sum())
    }

    fn write(
        &self,
        source: &Geometry,
        target: &Geometry,
        (ask, portion): (&Ask<'_>, &Portion),
        pages: (&[Vec<u64>], &[Vec<u64>]),
        writes: &mut Vec<Write>,
    ) {
        let part = self.part(source, target, ask, &portion.tokens, portion.at_end);
        let Some((source, target, part)) = part else { return };
        let lists = (pages.0.get(source.group as usize), pages.1.get(target.group as usize));
        let (Some(from), Some(to)) = lists else { return };
        let first = target.pages(ask.first_token, ask.tokens).start;
        let heads = (self.heads.start - source.heads.start, self.heads.start - target.heads.start);
        for piece in pieces(source, target, part) {
            let found = (from.get(piece.src.0 as usize), to.get((piece.dst.0 - first) as usize));
            let (Some(from), Some(to)) = found else { continue };
            let src = source.at(*from, 0, piece.src.1, heads.0.into());
            let dst = target.at(*to, 0, piece.dst.1, heads.1.into());
            let runs = Runs::of(source, target, self.num_heads(), piece.tokens);
            writes.extend(runs.offsets().map(|(s, d)| Write {
                src: (source.memory, src + s),
                dst: (target.memory, dst + d),
                len: runs.len,
            }));
        }
    }
}

impl Plan {
    /// The portions that one source sends.
    pub fn of(&self, source: usize) -> Option<&SourcePlan> {
        self.sources.get(source)
    }

    /// A table of it.
    pub fn show(&self) -> String {
        let Self { count, num_bytes, num_writes, .. } = self;
        let mut text = format!("count {count}, {num_bytes} bytes in {num_writes} writes\n");
        for (at, source) in self.sources.iter().enumerate() {
            let SourcePlan { count, num_bytes, num_writes, context, portions, .. } = source;
            let context = if *context { ", and the context" } else { "" };
            text += &format!("  source {at}: count {count}, {num_bytes} bytes in {num_writes} writes{context}\n");
            for Portion { tokens, layers, at_end, num_bytes, num_writes, .. } in portions {
                let when = if *at_end {
                    "at the end".to_owned()
                } else {
                    format!("tokens {} to {}, layers below {layers}", tokens.start, tokens.end)
                };
                text += &format!("    {when}: {num_bytes} bytes in {num_writes} writes\n");
            }
        }
        text
    }
}
