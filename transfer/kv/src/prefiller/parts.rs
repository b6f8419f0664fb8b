//! How far the parts of a request are: when it is over, and how. Loom's models compile this file, too.

/// One part of what a decoder waits for: a portion, or the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part<I> {
    Waits,
    UnderWay(I),
    Over,
}

/// Why nothing new of a request may leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    Cancelled,
    Failed(String),
}

/// All parts of a request, each by its number. `I` names what is under way.
#[derive(Debug)]
pub struct Parts<I> {
    parts: Vec<Part<I>>,
    stopped: Option<Stop>,
    may_land: bool,
}

impl<I: Copy> Parts<I> {
    /// Parts of which some are needed. The others are over.
    pub fn new(needed: impl Iterator<Item = bool>) -> Self {
        let parts = needed.map(|needed| if needed { Part::Waits } else { Part::Over }).collect();
        Self { parts, stopped: None, may_land: false }
    }

    /// Whether a part waits to be submitted.
    pub fn waits(&self, at: usize) -> bool {
        matches!(self.parts.get(at), Some(Part::Waits))
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// A part that waited is armed or being written.
    pub fn left(&mut self, at: usize, id: I) {
        self.parts.iter_mut().skip(at).take(1).for_each(|part| *part = Part::UnderWay(id));
    }

    /// A part has ended; perhaps bytes of it may still land.
    pub fn ended(&mut self, at: usize, may_land: bool) {
        self.may_land |= may_land;
        self.parts.iter_mut().skip(at).take(1).for_each(|part| *part = Part::Over);
    }

    /// Lets nothing new leave. Returns what is under way, to be called back, if this is the first stop.
    pub fn stop(&mut self, stop: Stop) -> Vec<I> {
        match (&self.stopped, &stop) {
            // The decoder waits for this answer.
            (Some(Stop::Failed(_)), Stop::Cancelled) => self.stopped = Some(stop),
            (Some(_), _) => {}
            (None, _) => {
                self.stopped = Some(stop);
                self.parts.iter_mut().filter(|part| matches!(part, Part::Waits)).for_each(|part| *part = Part::Over);
                let under_way = |part: &Part<I>| if let Part::UnderWay(id) = part { Some(*id) } else { None };
                return self.parts.iter().filter_map(under_way).collect();
            }
        }
        Vec::new()
    }

    /// Whether something is armed or being written.
    pub fn any_under_way(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::UnderWay(_)))
    }

    /// Nothing waits and nothing is under way.
    pub fn are_over(&self) -> bool {
        self.parts.iter().all(|part| matches!(part, Part::Over))
    }

    /// Why it was stopped, if it was, and whether bytes may still land.
    pub fn end(self) -> (Option<Stop>, bool) {
        (self.stopped, self.may_land)
    }
}
