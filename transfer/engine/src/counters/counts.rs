//! The words of counters: blocks of eight, found by immediate, and read without a lock.
//!
//! Writers hold the lock of [`Books`]. A block whose words are all 0 goes to the next immediates that need one, so counters that
//! were used and taken back cost nothing. Blocks and tables stay where they are until the end, so that readers may look at
//! any of them at any time: a block says whose it is, and a reader that finds it changed looks again.

use crate::sys::sync::{AtomicU64, AtomicUsize, OnceLock, Ordering, spin};

/// Counters of a block.
const WORDS: u32 = 8;
/// Lengths of the first table and of the first row of blocks. Each further one has twice as many.
const FIRST_TABLE: usize = 16;
const FIRST_ROW: usize = 4;
/// Tables and rows, at most: enough for every immediate there is.
const SIZES: usize = 30;
/// Set in every entry of a table.
const TAKEN: u64 = 1 << 63;

struct Block {
    /// The owner: a number that grows with every owner, and the owner's immediates.
    owner: AtomicU64,
    words: [AtomicU64; WORDS as usize],
}

impl Block {
    fn new() -> Self {
        Self { owner: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

/// The part of a block that only writers know.
#[derive(Default, Clone)]
struct Page {
    /// Somebody looks at its words for good.
    pinned: bool,
    /// Counters that somebody waits for, or shows elsewhere, as bits.
    noted: u8,
    /// The senders of the arrivals that were counted, as bits.
    senders: [u64; WORDS as usize],
}

/// The state that writers need, behind their lock.
#[derive(Default)]
pub struct Books {
    pages: Vec<Page>,
    free: Vec<u32>,
    owners: u32,
    entries: usize,
}

/// Where a counter is.
#[derive(Clone, Copy)]
pub struct Place {
    block: u32,
    word: usize,
}

/// Every counter of an engine.
pub struct Counts {
    tables: [OnceLock<Box<[AtomicU64]>>; SIZES],
    /// The table that counts.
    present: AtomicUsize,
    /// Grows before and after entries change their places.
    moves: AtomicUsize,
    rows: [OnceLock<Box<[Block]>>; SIZES],
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            tables: std::array::from_fn(|_| OnceLock::new()),
            present: AtomicUsize::new(0),
            moves: AtomicUsize::new(0),
            rows: std::array::from_fn(|_| OnceLock::new()),
        }
    }
}

fn key(imm: u32) -> u32 {
    imm / WORDS
}

fn entry(key: u32, block: u32) -> u64 {
    TAKEN | u64::from(key) << 32 | u64::from(block)
}

fn entry_key(entry: u64) -> u32 {
    ((entry & !TAKEN) >> 32) as u32
}

/// Where the search for a key begins. Tables have a power of two of entries.
fn home(key: u32, len: usize) -> usize {
    (u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (len - 1)
}

fn next(at: usize, len: usize) -> usize {
    (at + 1) & (len - 1)
}

/// Looks for a key; the entry, and where it is.
fn search(table: &[AtomicU64], key: u32) -> Option<(usize, u32)> {
    let mut at = home(key, table.len());
    for _ in 0..table.len() {
        let entry = table.get(at)?.load(Ordering::Acquire);
        if entry == 0 {
            return None;
        }
        if entry_key(entry) == key {
            return Some((at, entry as u32));
        }
        at = next(at, table.len());
    }
    None
}

fn insert(table: &[AtomicU64], key: u32, block: u32) {
    let mut at = home(key, table.len());
    for _ in 0..table.len() {
        let Some(slot) = table.get(at) else { return };
        if slot.load(Ordering::Relaxed) == 0 {
            slot.store(entry(key, block), Ordering::Release);
            return;
        }
        at = next(at, table.len());
    }
}

/// Takes an entry out, and moves those that stand behind it because of it.
fn remove(table: &[AtomicU64], mut hole: usize) {
    let len = table.len();
    let mut at = next(hole, len);
    while let Some(slot) = table.get(at) {
        let entry = slot.load(Ordering::Relaxed);
        if entry == 0 {
            break;
        }
        let begin = home(entry_key(entry), len);
        // An entry may move to the hole if its search comes by there.
        if (at.wrapping_sub(begin) & (len - 1)) >= (at.wrapping_sub(hole) & (len - 1)) {
            if let Some(target) = table.get(hole) {
                target.store(entry, Ordering::Release);
            }
            hole = at;
        }
        at = next(at, len);
    }
    if let Some(slot) = table.get(hole) {
        slot.store(0, Ordering::Release);
    }
}

/// The row of a block, and where in it.
fn row(block: u32) -> (usize, usize) {
    let index = block as usize / FIRST_ROW + 1;
    let row = index.ilog2() as usize;
    (row, block as usize - FIRST_ROW * ((1 << row) - 1))
}

impl Counts {
    fn block(&self, block: u32) -> Option<&Block> {
        let (row, at) = row(block);
        self.rows.get(row)?.get()?.get(at)
    }

    fn table(&self) -> Option<&[AtomicU64]> {
        self.tables.get(self.present.load(Ordering::Acquire))?.get().map(AsRef::as_ref)
    }

    /// The count of `imm`, read without a lock.
    pub fn value(&self, imm: u32) -> u64 {
        let key = key(imm);
        loop {
            let moves = self.moves.load(Ordering::Acquire);
            let found = self.table().and_then(|table| search(table, key));
            match found.and_then(|(_, block)| self.block(block)) {
                None if moves.is_multiple_of(2) && self.moves.load(Ordering::Acquire) == moves => return 0,
                None => {}
                Some(block) => {
                    let owner = block.owner.load(Ordering::Acquire);
                    let word = block.words.get((imm % WORDS) as usize);
                    let value = word.map_or(0, |word| word.load(Ordering::Acquire));
                    if owner as u32 == key && owner != 0 && block.owner.load(Ordering::Acquire) == owner {
                        return value;
                    }
                }
            }
            spin();
        }
    }

    /// Where the counter of `imm` is, if it has a place.
    pub fn find(&self, imm: u32) -> Option<Place> {
        let (_, block) = search(self.table()?, key(imm))?;
        Some(Place { block, word: (imm % WORDS) as usize })
    }

    /// Where the counter of `imm` is; it gets a place if it has none.
    pub fn place(&self, books: &mut Books, imm: u32) -> Place {
        if let Some(place) = self.find(imm) {
            return place;
        }
        let key = key(imm);
        let block = books.free.pop().unwrap_or_else(|| {
            books.pages.push(Page::default());
            books.pages.len() as u32 - 1
        });
        let (row, at) = row(block);
        if let Some(slots) = self.rows.get(row) {
            let len = FIRST_ROW << row;
            let blocks = slots.get_or_init(|| (0..len).map(|_| Block::new()).collect());
            books.owners = books.owners.wrapping_add(1).max(1);
            if let Some(block) = blocks.get(at) {
                block.owner.store(u64::from(books.owners) << 32 | u64::from(key), Ordering::Release);
            }
        }
        self.enter(books, key, block);
        Place { block, word: (imm % WORDS) as usize }
    }

    fn enter(&self, books: &mut Books, key: u32, block: u32) {
        books.entries += 1;
        let present = self.present.load(Ordering::Relaxed);
        let Some(table) = self.tables.get(present) else { return };
        let table = table.get_or_init(|| empty(FIRST_TABLE << present));
        if books.entries * 4 <= table.len() * 3 {
            insert(table, key, block);
            return;
        }
        let Some(larger) = self.tables.get(present + 1) else { return };
        let larger = larger.get_or_init(|| empty(FIRST_TABLE << (present + 1)));
        for slot in table {
            let entry = slot.load(Ordering::Relaxed);
            if entry != 0 {
                insert(larger, entry_key(entry), entry as u32);
            }
        }
        insert(larger, key, block);
        self.present.store(present + 1, Ordering::Release);
    }

    fn word(&self, place: Place) -> Option<&AtomicU64> {
        self.block(place.block)?.words.get(place.word)
    }

    pub fn load(&self, place: Place) -> u64 {
        self.word(place).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Sets a counter. At 0, nobody has sent anything, and a block without anything else becomes free.
    pub fn store(&self, books: &mut Books, place: Place, value: u64) {
        if let Some(word) = self.word(place) {
            word.store(value, Ordering::Release);
        }
        if value == 0 {
            if let Some(senders) = books.senders(place) {
                *senders = 0;
            }
            self.release(books, place);
        }
    }

    /// Frees a block that nobody needs.
    pub fn release(&self, books: &mut Books, place: Place) {
        let (Some(block), Some(page)) = (self.block(place.block), books.pages.get(place.block as usize)) else {
            return;
        };
        let used = block.words.iter().any(|word| word.load(Ordering::Relaxed) != 0);
        if used || page.pinned || page.noted != 0 {
            return;
        }
        let owner = block.owner.load(Ordering::Relaxed);
        let table = self.table().and_then(|table| Some((table, search(table, owner as u32)?.0)));
        let Some((table, at)) = table else { return };
        self.moves.fetch_add(1, Ordering::AcqRel);
        remove(table, at);
        self.moves.fetch_add(1, Ordering::AcqRel);
        block.owner.store(0, Ordering::Release);
        books.entries -= 1;
        books.free.push(place.block);
    }

    /// The address of a counter, which stays its place from now on.
    pub fn pin(&self, books: &mut Books, imm: u32) -> (usize, bool) {
        let place = self.place(books, imm);
        let page = books.pages.get_mut(place.block as usize);
        let first = page.is_some_and(|page| !std::mem::replace(&mut page.pinned, true));
        (self.word(place).map_or(0, |word| std::ptr::from_ref(word) as usize), first)
    }
}

fn empty(len: usize) -> Box<[AtomicU64]> {
    (0..len).map(|_| AtomicU64::new(0)).collect()
}

impl Books {
    /// The senders of the arrivals that a counter has counted.
    pub fn senders(&mut self, place: Place) -> Option<&mut u64> {
        self.pages.get_mut(place.block as usize)?.senders.get_mut(place.word)
    }

    /// Says whether somebody waits for a counter or shows it elsewhere.
    pub fn is_noted(&self, place: Place) -> bool {
        self.pages.get(place.block as usize).is_some_and(|page| page.noted & 1 << place.word != 0)
    }

    /// Says that somebody does, or not any more.
    pub fn note(&mut self, place: Place, noted: bool) {
        if let Some(page) = self.pages.get_mut(place.block as usize) {
            let bit = 1 << place.word;
            page.noted = if noted { page.noted | bit } else { page.noted & !bit };
        }
    }

    /// How many blocks were ever needed at a time.
    #[cfg(test)]
    pub fn blocks(&self) -> usize {
        self.pages.len()
    }
}
