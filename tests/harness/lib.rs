//! What the tests of Usurp share.
//!
//! | module | what it is |
//! |---|---|
//! | [`world`] | the simulation: the real target among simulated hosts, network and disks |
//! | [`net`] | the simulated network; its header states the fault model |
//! | [`host`], [`hostile`] | initiators that keep to the rules, and one that does not |
//! | [`bdev`] | the simulated disk |
//! | [`model`] | which data a read may find |
//! | [`profile`] | what a seed stands for |
//! | [`alloc`] | the allocator that counts |
//! | [`loopback`] | a fabric without faults and allocations, for `tests/no_alloc` |

#![deny(unsafe_code)]

pub mod alloc;
pub mod bdev;
pub mod host;
pub mod hostile;
pub mod loopback;
pub mod model;
pub mod net;
pub mod profile;
pub mod rng;
pub mod world;
