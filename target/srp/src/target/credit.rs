//! The credit sum of one channel (reference 4.3; known-bugs C1, C3, C4).
//!
//! ```text
//!           take()                  spend()                 grant(): delta on the wire
//!   held ----------> in_flight ------------------> owed ---------------------------------> held
//!                        `---- an RSP grants its own request's credit and all that is owed ---^
//! ```
//! Invariant, asserted at every change: given = held + in_flight + owed.

/// The credit of a channel, and at the same time the snapshot that callers get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Credits of the login; constant.
    given: u32,
    /// What the initiator may still send, as far as we have taken in what it sent.
    held: u32,
    /// Requests taken in whose credit is not yet given back.
    in_flight: u32,
    /// Credits of requests that end without a response: aborted ones, unknown IUs. The next RSP or
    /// CRED_REQ carries them.
    owed: u32,
}

impl Credit {
    pub(super) fn new(given: u32) -> Credit {
        Credit { given, held: given, in_flight: 0, owed: 0 }
    }

    /// Credits of the login.
    pub fn given(&self) -> u32 {
        self.given
    }
    /// What the initiator may still send.
    pub fn held(&self) -> u32 {
        self.held
    }
    /// Requests whose credit is not yet given back.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }
    /// Credits that wait for an IU to carry them.
    pub fn owed(&self) -> u32 {
        self.owed
    }

    #[inline]
    fn check(&self) {
        let sum = u64::from(self.held) + u64::from(self.in_flight) + u64::from(self.owed);
        assert_eq!(u64::from(self.given), sum, "given = held + in flight + owed");
    }

    /// A request came in. False: the initiator had no credit for it, and nothing changed.
    #[inline]
    pub(super) fn take(&mut self) -> bool {
        if self.held == 0 {
            return false;
        }
        self.held -= 1;
        self.in_flight += 1;
        self.check();
        true
    }

    /// A request that was taken ends without a response.
    #[inline]
    pub(super) fn spend(&mut self) {
        assert!(self.in_flight > 0, "a credit in flight");
        self.in_flight -= 1;
        self.owed += 1;
        self.check();
    }

    /// A response is built: its delta. `own` is false for a request that came without credit.
    #[inline]
    pub(super) fn grant_with_rsp(&mut self, own: bool) -> u32 {
        if own {
            self.spend();
        }
        self.grant_owed()
    }

    /// Hands over all that is owed: the delta of a CRED_REQ.
    #[inline]
    pub(super) fn grant_owed(&mut self) -> u32 {
        let delta = self.owed;
        self.owed = 0;
        self.held += delta;
        self.check();
        delta
    }

    /// An IU that carried `delta` never left. A peer that cheats may have spent credit it never
    /// got, so take what is there: the sum holds in any case.
    pub(super) fn ungrant(&mut self, delta: u32) {
        let back = delta.min(self.held);
        self.held -= back;
        self.owed += back;
        self.check();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_gives_back_its_credit_and_what_is_owed() {
        let mut c = Credit::new(4);
        assert!(c.take() && c.take() && c.take());
        c.spend();
        c.spend();
        assert_eq!((c.held(), c.in_flight(), c.owed()), (1, 1, 2));
        assert_eq!(c.grant_with_rsp(true), 3);
        assert_eq!(c, Credit::new(4));
    }

    #[test]
    fn no_credit_changes_nothing() {
        let mut c = Credit::new(2);
        assert!(c.take() && c.take());
        let before = c;
        assert!(!c.take());
        assert_eq!(c, before);
        assert_eq!(c.grant_with_rsp(false), 0);
    }

    #[test]
    fn an_undone_grant_is_owed_again() {
        let mut c = Credit::new(2);
        c.take();
        let delta = c.grant_with_rsp(true);
        c.ungrant(delta);
        assert_eq!((c.held(), c.in_flight(), c.owed()), (1, 0, 1));
        c.ungrant(9);
        assert_eq!((c.held(), c.owed()), (0, 2));
    }

    #[test]
    #[should_panic(expected = "a credit in flight")]
    fn a_credit_is_not_spent_twice() {
        Credit::new(2).spend();
    }
}
