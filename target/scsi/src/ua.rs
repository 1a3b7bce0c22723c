//! Unit attentions of one I_T nexus on one logical unit (SAM-5).
//!
//! Owns: the queue. Never does: decide who has to hear of an event; the target raises it here, for
//! every nexus concerned (reference 8.6).
//!
//! ```text
//!   raise(ua) --> [ 29/00 | 2A/09 | ...          ] --> report()   one per command, oldest first
//!                   29/xx empties the queue first; equal ones are not queued twice;
//!                   a full queue becomes one 29/00
//! ```
//!
//! Invariants: no two equal entries; at most one 29/xx, and it stands first; nothing is ever lost
//! without a 29/00 in its place (which tells the initiator to look at everything again).

use crate::sense::{Key, Sense};

/// Entries in the queue.
pub const UA_MAX: usize = 8;

const RESETS: u8 = 0x29;

/// A unit attention condition: ADDITIONAL SENSE CODE and qualifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ua {
    /// ADDITIONAL SENSE CODE.
    pub asc: u8,
    /// ADDITIONAL SENSE CODE QUALIFIER.
    pub ascq: u8,
}

impl Ua {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED: what a new nexus finds.
    pub const POWER_ON: Ua = Ua { asc: 0x29, ascq: 0x00 };
    /// BUS DEVICE RESET FUNCTION OCCURRED: LOGICAL UNIT RESET by another nexus.
    pub const LU_RESET: Ua = Ua { asc: 0x29, ascq: 0x03 };
    /// I_T NEXUS LOSS OCCURRED.
    pub const NEXUS_LOSS: Ua = Ua { asc: 0x29, ascq: 0x07 };
    /// MODE PARAMETERS CHANGED.
    pub const MODE_CHANGED: Ua = Ua { asc: 0x2A, ascq: 0x01 };
    /// CAPACITY DATA HAS CHANGED.
    pub const CAPACITY_CHANGED: Ua = Ua { asc: 0x2A, ascq: 0x09 };
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    pub const COMMANDS_CLEARED: Ua = Ua { asc: 0x2F, ascq: 0x00 };
    /// INQUIRY DATA HAS CHANGED.
    pub const INQUIRY_CHANGED: Ua = Ua { asc: 0x3F, ascq: 0x03 };
    /// REPORTED LUNS DATA HAS CHANGED.
    pub const LUNS_CHANGED: Ua = Ua { asc: 0x3F, ascq: 0x0E };

    /// As sense data.
    pub const fn sense(self) -> Sense {
        Sense::new(Key::UnitAttention, self.asc, self.ascq)
    }
}

/// What one I_T nexus has pending on one logical unit. Per nexus, not per channel.
#[derive(Clone, Debug)]
pub struct NexusLu {
    /// Pending conditions, oldest first; the first `len` count.
    queue: [Ua; UA_MAX],
    /// Entries in `queue`, at most `UA_MAX`.
    len: u8,
}

impl Default for NexusLu {
    fn default() -> NexusLu {
        NexusLu::new()
    }
}

impl NexusLu {
    /// A new nexus: 29/00 is pending.
    pub const fn new() -> NexusLu {
        NexusLu { queue: [Ua::POWER_ON; UA_MAX], len: 1 }
    }

    /// Queues a condition by the rules above.
    pub fn raise(&mut self, ua: Ua) {
        if self.pending().contains(&ua) {
            return;
        }
        if ua.asc == RESETS {
            // A reset subsumes what came before it. Of two resets the lower qualifier is the wider
            // event (29/00 says everything); it stays (SAM-5, precedence of 29/xx).
            let old = self.pending().first().copied().filter(|first| first.asc == RESETS);
            self.queue[0] = old.filter(|first| first.ascq < ua.ascq).unwrap_or(ua);
            self.len = 1;
        } else if usize::from(self.len) == UA_MAX {
            self.queue[0] = Ua::POWER_ON;
            self.len = 1;
        } else {
            self.queue[usize::from(self.len)] = ua;
            self.len += 1;
        }
        assert!(usize::from(self.len) <= UA_MAX, "the queue has {UA_MAX} entries");
    }

    /// Takes the oldest condition out.
    pub fn report(&mut self) -> Option<Ua> {
        let first = self.pending().first().copied()?;
        self.queue.copy_within(1..usize::from(self.len), 0);
        self.len -= 1;
        Some(first)
    }

    /// Whether nothing is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is pending, oldest first.
    pub fn pending(&self) -> &[Ua] {
        &self.queue[..usize::from(self.len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> NexusLu {
        let mut nexus = NexusLu::new();
        assert_eq!(nexus.report(), Some(Ua::POWER_ON));
        assert!(nexus.is_empty());
        nexus
    }

    #[test]
    fn a_new_nexus_has_power_on_pending_once() {
        assert_eq!(quiet().report(), None);
    }

    #[test]
    fn conditions_are_reported_one_at_a_time_in_order_without_duplicates() {
        let mut nexus = quiet();
        for ua in [Ua::CAPACITY_CHANGED, Ua::MODE_CHANGED, Ua::CAPACITY_CHANGED] {
            nexus.raise(ua);
        }
        assert_eq!(nexus.report(), Some(Ua::CAPACITY_CHANGED));
        assert_eq!(nexus.report(), Some(Ua::MODE_CHANGED));
        assert_eq!(nexus.report(), None);
    }

    #[test]
    fn a_reset_clears_what_is_older_and_the_wider_reset_stays() {
        let mut nexus = quiet();
        nexus.raise(Ua::CAPACITY_CHANGED);
        nexus.raise(Ua::NEXUS_LOSS);
        assert_eq!(nexus.pending(), [Ua::NEXUS_LOSS]);
        nexus.raise(Ua::LUNS_CHANGED);
        nexus.raise(Ua::LU_RESET);
        assert_eq!(nexus.pending(), [Ua::LU_RESET]);
        nexus.raise(Ua::NEXUS_LOSS);
        assert_eq!(nexus.pending(), [Ua::LU_RESET]);
    }

    #[test]
    fn an_overflow_becomes_one_power_on() {
        let mut nexus = quiet();
        for ascq in 0..UA_MAX as u8 {
            nexus.raise(Ua { asc: 0x2A, ascq });
        }
        assert_eq!(nexus.pending().len(), UA_MAX);
        nexus.raise(Ua::LUNS_CHANGED);
        assert_eq!(nexus.pending(), [Ua::POWER_ON]);
    }
}
