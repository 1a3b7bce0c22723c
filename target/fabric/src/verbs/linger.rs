//! What is left of destroyed connections.
//!
//! ```text
//!   destroy ── the peer is still to answer our DREQ ──> identifier + queue pair
//!      |                                                  | DREP, or DREQ_WAIT has passed
//!      `── nothing to wait for ──> queue pair alone <-----'
//!                                     | NUMBER_WAIT
//!                                     v
//!                                    gone
//! ```
//! An identifier that is destroyed stops the kernel's CM from sending DREQ again: a peer whose
//! cable was out would never hear of it, and would have to find out by its own time-outs. A queue
//! pair that is destroyed frees its number, which the peer would refuse as stale as long as it
//! knows the old connection by it: so it goes last.
//!
//! Bounded in number: the oldest goes when there are too many. Dropping the whole ends all at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long DREQ may go unanswered. Linux's CM sends it 16 times, 4.3 s apart, and then reports the
/// connection as disconnected: this is only for a kernel that forgets to.
const DREQ_WAIT: Duration = Duration::from_secs(75);
/// How long a queue pair keeps its number after its connection has ended.
const NUMBER_WAIT: Duration = Duration::from_secs(2);
/// Destroyed connections that linger at a time.
const MOST: usize = 256;

/// What is left of one connection. The identifier goes first: fields are dropped in order.
struct Left<I, E> {
    conn: u64,
    /// Until the peer has answered.
    id: Option<I>,
    /// The queue pair.
    _endpoint: Option<E>,
    until: Instant,
}

/// See the module's header. `I` is an identifier, `E` an endpoint with its queue pair.
pub(super) struct Lingering<I, E> {
    left: VecDeque<Left<I, E>>,
}

impl<I, E> Lingering<I, E> {
    /// Nothing lingers.
    pub(super) fn new() -> Lingering<I, E> {
        Lingering { left: VecDeque::new() }
    }

    /// A connection was destroyed; `id` if the peer is still to answer.
    pub(super) fn add(&mut self, conn: u64, id: Option<I>, endpoint: Option<E>, now: Instant) {
        if id.is_none() && endpoint.is_none() {
            return;
        }
        if self.left.len() == MOST {
            self.left.pop_front();
        }
        let until = now + if id.is_some() { DREQ_WAIT } else { NUMBER_WAIT };
        self.left.push_back(Left { conn, id, _endpoint: endpoint, until });
    }

    /// The peer has answered, or the kernel gave up; false: this connection does not linger.
    pub(super) fn on_answer(&mut self, conn: u64, now: Instant) -> bool {
        let Some(left) = self.left.iter_mut().find(|l| l.conn == conn) else { return false };
        if left.id.take().is_some() {
            left.until = now + NUMBER_WAIT;
        }
        true
    }

    /// Its device is gone: nothing of it may stay.
    pub(super) fn forget(&mut self, conn: u64) {
        self.left.retain(|l| l.conn != conn);
    }

    /// What has lingered long enough goes.
    pub(super) fn expire(&mut self, now: Instant) {
        for left in self.left.iter_mut().filter(|l| l.until <= now && l.id.is_some()) {
            left.id = None;
            left.until = now + NUMBER_WAIT;
        }
        self.left.retain(|l| l.until > now);
    }

    /// When `expire` has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.left.iter().map(|l| l.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Tells its name when it goes.
    struct Named(&'static str, Sender<&'static str>);

    impl Drop for Named {
        fn drop(&mut self) {
            self.1.send(self.0).expect("the test listens");
        }
    }

    struct Rig {
        lingering: Lingering<Named, Named>,
        start: Instant,
        tell: Sender<&'static str>,
        gone: Receiver<&'static str>,
    }

    impl Rig {
        fn new() -> Rig {
            let (tell, gone) = channel();
            Rig { lingering: Lingering::new(), start: Instant::now(), tell, gone }
        }

        fn add(&mut self, conn: u64, id: Option<&'static str>, qp: Option<&'static str>) {
            let named = |name| Named(name, self.tell.clone());
            self.lingering.add(conn, id.map(named), qp.map(named), self.start);
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        /// What went since it was last asked.
        fn gone(&self) -> Vec<&'static str> {
            self.gone.try_iter().collect()
        }
    }

    #[test]
    fn an_unanswered_dreq_keeps_its_identifier_longer_than_the_cm_sends_it() {
        let mut rig = Rig::new();
        rig.add(1, Some("id"), Some("qp"));
        rig.lingering.expire(rig.at(70_000));
        assert!(rig.gone().is_empty());
        assert_eq!(rig.lingering.next_deadline(), Some(rig.at(75_000)));
        rig.lingering.expire(rig.at(75_000));
        assert_eq!(rig.gone(), ["id"]);
        rig.lingering.expire(rig.at(77_000));
        assert_eq!(rig.gone(), ["qp"]);
        assert_eq!(rig.lingering.next_deadline(), None);
    }

    #[test]
    fn an_answer_frees_the_identifier_at_once_and_the_number_later() {
        let mut rig = Rig::new();
        rig.add(7, Some("id"), Some("qp"));
        assert!(!rig.lingering.on_answer(8, rig.at(100)));
        assert!(rig.lingering.on_answer(7, rig.at(100)));
        assert_eq!(rig.gone(), ["id"]);
        // A second event, such as TIMEWAIT_EXIT after DISCONNECTED, does not lengthen it.
        assert!(rig.lingering.on_answer(7, rig.at(2_000)));
        assert_eq!(rig.lingering.next_deadline(), Some(rig.at(2_100)));
        rig.lingering.expire(rig.at(2_100));
        assert_eq!(rig.gone(), ["qp"]);
    }

    #[test]
    fn an_ended_connection_keeps_its_number_only() {
        let mut rig = Rig::new();
        rig.add(1, None, Some("qp"));
        rig.add(2, None, None);
        assert_eq!(rig.lingering.next_deadline(), Some(rig.at(2_000)));
        assert!(!rig.lingering.on_answer(2, rig.at(1)));
        // Later ones with an earlier end do not wait for earlier ones.
        rig.add(3, Some("id"), Some("other"));
        rig.lingering.expire(rig.at(2_000));
        assert_eq!(rig.gone(), ["qp"]);
    }

    #[test]
    fn a_device_that_goes_takes_everything_along() {
        let mut rig = Rig::new();
        rig.add(1, Some("id"), Some("qp"));
        rig.add(2, Some("id2"), Some("qp2"));
        rig.lingering.forget(1);
        assert_eq!(rig.gone(), ["id", "qp"]);
        rig.lingering = Lingering::new();
        assert_eq!(rig.gone(), ["id2", "qp2"]);
    }

    #[test]
    fn the_oldest_goes_when_there_are_too_many() {
        let mut rig = Rig::new();
        rig.add(0, Some("first"), None);
        for conn in 1..=MOST as u64 {
            rig.add(conn, Some("later"), None);
        }
        assert_eq!(rig.gone(), ["first"]);
        assert!(!rig.lingering.on_answer(0, rig.start));
    }
}
