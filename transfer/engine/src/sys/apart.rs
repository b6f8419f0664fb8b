//! Values that one thread writes, apart from what others use.

/// Keeps what one thread writes off the cache lines of what others use. Two lines, because processors fetch pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub T);

impl<T> std::ops::Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
