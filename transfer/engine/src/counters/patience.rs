//! Whether a caller that waits for room still wants to: Python's Ctrl-C has to be heard there.

use std::cell::Cell;

thread_local! {
    /// Says that the thread does not want to wait any longer.
    static GIVES_UP: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// Says whether the present thread does not want to wait any longer. The caller holds no lock.
pub(crate) fn gives_up() -> bool {
    GIVES_UP.get().is_some_and(|ask| ask())
}

/// Does something that may wait, and asks now and then whether to give up.
pub fn asking<T>(ask: fn() -> bool, work: impl FnOnce() -> T) -> T {
    let before = GIVES_UP.replace(Some(ask));
    let result = work();
    GIVES_UP.set(before);
    result
}
