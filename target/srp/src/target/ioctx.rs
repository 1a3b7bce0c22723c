//! Send ioctxs: the slot of a command or task management request from its IU until its response's
//! send completion.
//!
//! Owns: each slot's state and the free list. Never does: anything with data, descriptors or
//! buffers. Invariants: a state changes only as [`TABLE`] says, else the process stops; a slot is
//! on the free list iff it is `Free`. The picture is `ioctx.dot`; a test compares it with the
//! table.
//!
//! ```text
//!          TakeCmd            Respond
//!   Free ----------> Active -----------> RspPosted --- Sent | Unpost ---> Free
//!    |                 `----- Silent ------------------------------------> Free
//!    `- TakeTm ----> Mgmt -- RespondTm -> RspPosted
//!                      `----- Silent ------------------------------------> Free
//! ```

use crate::Tag;

/// Index of a send ioctx.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoctxId(pub u16);

/// State of a send ioctx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IoctxState {
    /// On the free list.
    Free,
    /// A command: data moves, or a bdev works on it.
    Active,
    /// A task management request is carried out.
    Mgmt,
    /// The response is built and posted.
    RspPosted,
}

/// What happens to a send ioctx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IoctxEvent {
    /// An SRP_CMD takes it.
    TakeCmd,
    /// An SRP_TSK_MGMT takes it.
    TakeTm,
    /// The response to a command is built.
    Respond,
    /// The response to a task management request is built.
    RespondTm,
    /// The response's send completion came.
    Sent,
    /// The response could not be posted.
    Unpost,
    /// It ends without a response: aborted, or the channel is gone.
    Silent,
}

/// All states, in the order of their numbers.
pub const STATES: [IoctxState; 4] =
    [IoctxState::Free, IoctxState::Active, IoctxState::Mgmt, IoctxState::RspPosted];
/// All events, in the order of their numbers.
pub const EVENTS: [IoctxEvent; 7] = [
    IoctxEvent::TakeCmd,
    IoctxEvent::TakeTm,
    IoctxEvent::Respond,
    IoctxEvent::RespondTm,
    IoctxEvent::Sent,
    IoctxEvent::Unpost,
    IoctxEvent::Silent,
];

/// The allowed transitions: `TABLE[state][event]` is the next state, `None` is a bug of ours.
pub const TABLE: [[Option<IoctxState>; EVENTS.len()]; STATES.len()] = {
    use IoctxState::{Active, Free, Mgmt, RspPosted};
    [
        // TakeCmd     TakeTm      Respond          RespondTm        Sent        Unpost      Silent
        [Some(Active), Some(Mgmt), None, None, None, None, None], // Free
        [None, None, Some(RspPosted), None, None, None, Some(Free)], // Active
        [None, None, None, Some(RspPosted), None, None, Some(Free)], // Mgmt
        [None, None, None, None, Some(Free), Some(Free), None],   // RspPosted
    ]
};

/// One send ioctx; 16 bytes, so that four share a cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ioctx {
    /// Tag of the request it serves; stale while `Free`.
    pub tag: Tag,
    /// Credits its response carried; valid in `RspPosted`.
    pub delta: u32,
    /// Changed only by `Ioctxs::apply`.
    state: IoctxState,
    /// The request came with a credit. Not so when the initiator overran its limit.
    pub credit: bool,
    /// SOL_NOT byte of the request.
    pub sol_not: u8,
}

const _: () = assert!(size_of::<Ioctx>() == 16);

/// All send ioctxs of a channel.
#[derive(Debug)]
pub(super) struct Ioctxs {
    /// Fixed length.
    slots: Box<[Ioctx]>,
    /// Indices of the free slots, last used on top; never longer than `slots`.
    free: Vec<u16>,
}

impl Ioctxs {
    /// `count` free slots. The only allocation of a channel.
    pub fn new(count: u32) -> Ioctxs {
        assert!(count <= u32::from(u16::MAX), "an ioctx index has 16 bits");
        let slot = Ioctx {
            tag: Tag::default(),
            delta: 0,
            state: IoctxState::Free,
            credit: false,
            sol_not: 0,
        };
        let slots = vec![slot; count as usize].into_boxed_slice();
        Ioctxs { slots, free: (0..count as u16).rev().collect() }
    }

    /// Number of free slots.
    #[inline]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Number of slots.
    #[inline]
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Takes a free slot for `event`; the caller has checked that there is one.
    #[inline]
    pub fn take(&mut self, event: IoctxEvent, tag: Tag, credit: bool, sol_not: u8) -> IoctxId {
        let index = self.free.pop().expect("the caller saw a free ioctx");
        let id = IoctxId(index);
        self.step(id, event);
        let slot = &mut self.slots[usize::from(index)];
        slot.tag = tag;
        slot.credit = credit;
        slot.sol_not = sol_not;
        id
    }

    /// Applies `event` to a slot in use and returns the slot.
    #[inline]
    pub fn apply(&mut self, id: IoctxId, event: IoctxEvent) -> &mut Ioctx {
        if self.step(id, event) == IoctxState::Free {
            assert!(self.free.len() < self.slots.len(), "a slot is freed once");
            self.free.push(id.0);
        }
        &mut self.slots[usize::from(id.0)]
    }

    #[inline]
    fn step(&mut self, id: IoctxId, event: IoctxEvent) -> IoctxState {
        let slot = &mut self.slots[usize::from(id.0)];
        let Some(next) = TABLE[slot.state as usize][event as usize] else {
            refuse(id, slot.state, event)
        };
        slot.state = next;
        next
    }

    /// The slot, whatever its state.
    #[inline]
    pub fn get(&self, id: IoctxId) -> &Ioctx {
        &self.slots[usize::from(id.0)]
    }

    /// State of a slot.
    #[inline]
    pub fn state(&self, id: IoctxId) -> IoctxState {
        self.slots[usize::from(id.0)].state
    }

    /// All slots with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (IoctxId, IoctxState, Tag)> + '_ {
        self.slots.iter().zip(0_u16..).map(|(s, i)| (IoctxId(i), s.state, s.tag))
    }
}

/// Apart, so that the hot path holds no formatting code.
#[cold]
#[inline(never)]
fn refuse(id: IoctxId, state: IoctxState, event: IoctxEvent) -> ! {
    panic!("ioctx {}: {event:?} is not allowed in state {state:?}", id.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn graphviz() -> String {
        let mut text = String::from("digraph ioctx {\n    rankdir = LR;\n");
        for from in STATES {
            for event in EVENTS {
                if let Some(to) = TABLE[from as usize][event as usize] {
                    writeln!(text, "    {from:?} -> {to:?} [label = {event:?}];").unwrap();
                }
            }
        }
        text + "}\n"
    }

    #[test]
    fn the_picture_is_that_of_the_table() {
        let text = graphviz();
        print!("{text}");
        assert_eq!(text, include_str!("ioctx.dot"));
    }

    #[test]
    fn numbers_of_states_and_events_index_the_table() {
        assert!(STATES.iter().enumerate().all(|(i, &s)| s as usize == i));
        assert!(EVENTS.iter().enumerate().all(|(i, &e)| e as usize == i));
    }

    /// A pool of two whose slot 0 is in `state`.
    fn in_state(state: IoctxState) -> Ioctxs {
        let mut pool = Ioctxs::new(2);
        let tag = Tag::default();
        match state {
            IoctxState::Free => {}
            IoctxState::Active => assert_eq!(pool.take(IoctxEvent::TakeCmd, tag, true, 0).0, 0),
            IoctxState::Mgmt => assert_eq!(pool.take(IoctxEvent::TakeTm, tag, true, 0).0, 0),
            IoctxState::RspPosted => {
                pool.take(IoctxEvent::TakeCmd, tag, true, 0);
                pool.apply(IoctxId(0), IoctxEvent::Respond);
            }
        }
        pool
    }

    #[test]
    fn every_event_in_every_state_does_what_the_table_says() {
        for state in STATES {
            for event in EVENTS {
                let mut pool = in_state(state);
                let free = pool.free();
                assert_eq!(pool.state(IoctxId(0)), state);
                let done = catch_unwind(AssertUnwindSafe(|| match event {
                    IoctxEvent::TakeCmd | IoctxEvent::TakeTm if state == IoctxState::Free => {
                        pool.take(event, Tag::default(), true, 0);
                    }
                    _ => drop(pool.apply(IoctxId(0), event)),
                }));
                let allowed = TABLE[state as usize][event as usize];
                assert_eq!(done.is_ok(), allowed.is_some(), "{state:?} {event:?}");
                let next = allowed.unwrap_or(state);
                assert_eq!(pool.state(IoctxId(0)), next);
                let was = usize::from(state == IoctxState::Free);
                let is = usize::from(next == IoctxState::Free);
                assert_eq!(pool.free() + was, free + is, "{state:?} {event:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn an_id_of_another_channel_is_a_bug() {
        Ioctxs::new(2).apply(IoctxId(2), IoctxEvent::Sent);
    }
}
