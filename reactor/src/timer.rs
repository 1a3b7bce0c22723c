//! Timers of one reactor: a binary heap of fixed capacity. Time is an argument, so a simulation
//! drives it with virtual time. Never allocates after `new`, never reads a clock.
//!
//! ```text
//!   arm(at, token) -> TimerId{slot, generation}       heap: earliest first; equal times in the
//!   cancel(id)     : O(log n), stale ids do nothing         order they were armed
//!   pop_due(now)   -> token, earliest first           slots: id -> place in the heap
//! ```
//! Invariants: `heap[slots[s].place].slot == s` for every armed slot; a slot's generation changes
//! whenever its timer ends, so that an old id never cancels a new timer.

use crate::Nanos;

/// Names one armed timer; stale as soon as it fired or was cancelled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TimerId {
    /// Which slot.
    slot: u32,
    /// The slot's generation when it was armed.
    generation: u32,
}

/// One armed timer in the heap.
#[derive(Clone, Copy)]
struct Entry {
    /// When it is due.
    at: Nanos,
    /// How many were armed before it: breaks ties, first armed first out.
    order: u64,
    /// Its slot.
    slot: u32,
}

impl Entry {
    fn before(&self, other: &Entry) -> bool {
        (self.at, self.order) < (other.at, other.order)
    }
}

/// Where an id leads.
struct Slot {
    /// Goes up (and wraps) whenever the slot's timer ends.
    generation: u32,
    /// Place in the heap; [`FREE`] when not armed.
    place: u32,
    /// What the owner wants back.
    token: u64,
}

/// Place of a slot that is not armed.
const FREE: u32 = u32::MAX;

/// Timers, at most `capacity` at a time.
pub struct TimerHeap {
    /// The armed ones in heap order. Never grows beyond its capacity.
    heap: Vec<Entry>,
    /// One per possible timer.
    slots: Vec<Slot>,
    /// Slots not armed; the top is used next.
    free: Vec<u32>,
    /// How many were ever armed.
    armed: u64,
}

impl TimerHeap {
    /// Room for `capacity` timers.
    pub fn new(capacity: usize) -> TimerHeap {
        let count = u32::try_from(capacity).expect("fewer than 2^32 timers");
        let slot = |_| Slot { generation: 0, place: FREE, token: 0 };
        TimerHeap {
            heap: Vec::with_capacity(capacity),
            slots: (0..count).map(slot).collect(),
            free: (0..count).rev().collect(),
            armed: 0,
        }
    }

    /// Arms a timer that is due `at`; `None` when the heap is full.
    pub fn arm(&mut self, at: Nanos, token: u64) -> Option<TimerId> {
        let slot = self.free.pop()?;
        let place = self.heap.len();
        assert!(place < self.slots.len());
        let entry = &mut self.slots[slot as usize];
        assert_eq!(entry.place, FREE);
        entry.token = token;
        let generation = entry.generation;
        self.heap.push(Entry { at, order: self.armed, slot });
        self.armed += 1;
        self.rise(place);
        Some(TimerId { slot, generation })
    }

    /// Ends a timer. False when it already fired or was cancelled: then nothing happens.
    pub fn cancel(&mut self, id: TimerId) -> bool {
        let slot = &self.slots[id.slot as usize];
        if slot.place == FREE || slot.generation != id.generation {
            return false;
        }
        self.remove(slot.place as usize);
        true
    }

    /// The token of the earliest timer that is due at `now`, which ends; `None` when none is.
    /// Call until `None`, or a bounded number of times a turn.
    pub fn pop_due(&mut self, now: Nanos) -> Option<u64> {
        let first = self.heap.first()?;
        if first.at > now { None } else { Some(self.remove(0)) }
    }

    /// When the earliest timer is due.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.first().map(|entry| entry.at)
    }

    /// How many are armed.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// True when none is armed.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// How many can be armed at a time.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Takes the entry at `place` out and frees its slot: the token.
    fn remove(&mut self, place: usize) -> u64 {
        let entry = self.heap.swap_remove(place);
        let slot = &mut self.slots[entry.slot as usize];
        assert_eq!(slot.place as usize, place);
        slot.place = FREE;
        slot.generation = slot.generation.wrapping_add(1);
        let token = slot.token;
        self.free.push(entry.slot);
        if place < self.heap.len() {
            // The last entry came here: it may belong further down or further up.
            let place = self.sink(place);
            self.rise(place);
        }
        token
    }

    /// Moves the entry at `place` up to where it belongs, and notes its place.
    fn rise(&mut self, mut place: usize) {
        while place > 0 {
            let parent = (place - 1) / 2;
            if !self.heap[place].before(&self.heap[parent]) {
                break;
            }
            self.swap(place, parent);
            place = parent;
        }
        self.note(place);
    }

    /// Moves the entry at `place` down to where it belongs; returns where.
    fn sink(&mut self, mut place: usize) -> usize {
        loop {
            let left = 2 * place + 1;
            if left >= self.heap.len() {
                break;
            }
            let right = (left + 1).min(self.heap.len() - 1);
            let child = if self.heap[right].before(&self.heap[left]) { right } else { left };
            if !self.heap[child].before(&self.heap[place]) {
                break;
            }
            self.swap(place, child);
            place = child;
        }
        self.note(place);
        place
    }

    fn swap(&mut self, one: usize, two: usize) {
        self.heap.swap(one, two);
        self.note(one);
        self.note(two);
    }

    fn note(&mut self, place: usize) {
        self.slots[self.heap[place].slot as usize].place = place as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_and_equal_ones_as_armed() {
        let mut timers = TimerHeap::new(8);
        for (at, token) in [(30, 1), (10, 2), (20, 3), (10, 4), (10, 5)] {
            timers.arm(at, token).unwrap();
        }
        assert_eq!((timers.next(), timers.len()), (Some(10), 5));
        assert_eq!(timers.pop_due(9), None);
        let fired: Vec<u64> = std::iter::from_fn(|| timers.pop_due(25)).collect();
        assert_eq!(fired, [2, 4, 5, 3]);
        assert_eq!((timers.pop_due(30), timers.next()), (Some(1), None));
        assert!(timers.is_empty());
    }

    #[test]
    fn a_full_heap_refuses_and_recovers() {
        let mut timers = TimerHeap::new(2);
        let first = timers.arm(1, 1).unwrap();
        timers.arm(2, 2).unwrap();
        assert_eq!(timers.arm(3, 3), None);
        assert!(timers.cancel(first));
        assert!(timers.arm(3, 3).is_some());
        assert_eq!(timers.capacity(), 2);
    }

    #[test]
    fn a_stale_id_cancels_nothing() {
        let mut timers = TimerHeap::new(1);
        let fired = timers.arm(1, 1).unwrap();
        assert_eq!(timers.pop_due(1), Some(1));
        assert!(!timers.cancel(fired));
        let newer = timers.arm(2, 2).unwrap();
        assert!(!timers.cancel(fired), "the slot's new timer is another");
        assert!(timers.cancel(newer) && !timers.cancel(newer));
    }

    #[test]
    fn a_heap_of_none_refuses_everything() {
        let mut timers = TimerHeap::new(0);
        assert_eq!((timers.arm(1, 1), timers.pop_due(9), timers.next()), (None, None, None));
    }

    #[test]
    fn random_traffic_agrees_with_a_sorted_list() {
        let mut seed = 7u64;
        let mut random = move |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        let mut timers = TimerHeap::new(64);
        let mut model: Vec<(Nanos, u64, TimerId)> = Vec::new();
        let mut now = 0;
        for token in 0..50_000 {
            match random(4) {
                0 | 1 => {
                    let at = now + random(1000);
                    match timers.arm(at, token) {
                        Some(id) => model.push((at, token, id)),
                        None => assert_eq!(model.len(), 64),
                    }
                }
                2 if !model.is_empty() => {
                    let (.., id) = model.swap_remove(random(model.len() as u64) as usize);
                    assert!(timers.cancel(id));
                }
                _ => {
                    now += random(100);
                    // Tokens grow as timers are armed, so they break ties as the heap does.
                    model.sort_by_key(|&(at, token, _)| (at, token));
                    while model.first().is_some_and(|&(at, ..)| at <= now) {
                        assert_eq!(timers.pop_due(now), Some(model.remove(0).1));
                    }
                    assert_eq!(timers.pop_due(now), None);
                }
            }
            assert_eq!(timers.next(), model.iter().map(|&(at, ..)| at).min());
        }
    }
}
