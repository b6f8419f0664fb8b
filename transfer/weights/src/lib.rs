//! Weights from sharded trainers into running rollout engines, on the transfer engine.
//!
//! Which trainer writes which bytes to which rollout rank follows from the trainers' [`Param`]s and the rollout ranks' [`Slot`]s alone.
//! So a rollout rank knows the count of writes that completes a version, and a version costs no message between them.
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod area;
mod balance;
mod model;
mod pieces;
mod place;
mod plan;
#[cfg(test)]
mod plan_tests;
mod runs;
mod schedule;
mod writer;

pub use area::Area;
pub use model::{Cell, Dtype, Layout, Memory, Param, Recipe, Scale, Slot, Target};
pub use place::{Place, pack_descs};
pub use plan::{PlanOptions, plan};
pub use runs::{Run, runs};
pub use schedule::{Dest, Item, Schedule, Task};
pub use writer::{Source, Writer};
