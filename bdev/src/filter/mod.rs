//! Filters: bdevs that stand on another bdev.
//!
//! Owns: what filters share, which is the claim on the base and the forwarding of what it is.
//! Never does: lending. Memory lent in place would go round the filter.
//!
//! ```text
//!  front queue --submit--> filter queue --submit--> base's queue   (Bdev::queue, not emulated:
//!              <--poll----              <--poll----                 the front queue did that)
//! ```

pub mod delay;
pub mod error;

use std::sync::Arc;

use crate::contract::{Bdev, BdevError, Caps, Geometry, Queue, QueueSetup};
use crate::registry::OpenContext;

/// The part that all filters have: a name and a base that is theirs alone.
struct Filter {
    /// The filter's own name.
    name: String,
    /// The claimed base.
    base: Arc<dyn Bdev>,
}

impl Filter {
    /// Claims `base`; `key` is where its name stands in the configuration.
    fn claim(
        name: &str,
        key: &str,
        base: &str,
        context: &mut OpenContext<'_>,
    ) -> Result<Filter, BdevError> {
        Ok(Filter { name: name.to_string(), base: context.claim_base(key, base)? })
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.base.geometry()
    }

    fn caps(&self) -> Caps {
        self.base.caps()
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        self.base.queue(setup)
    }
}
