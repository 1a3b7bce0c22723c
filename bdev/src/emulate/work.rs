//! One emulated I/O: what it still has to do, one module I/O after another.
//!
//! Owns: the caller's `Io`, and a piece of scratch memory while data has to be made up or compared.
//! Never does: decide whether to emulate (`mod.rs` does), or have two module I/Os in flight.
//!
//! ```text
//!  Native(op) ----------------------------------+
//!    | NotSupported (unmap, write zeroes)       |
//!    v                                          v
//!  Fill: chunk, chunk, ... ----------------> [Flush] --> Finished
//!  Compare (read) --equal--> Exchange (write) --^
//!        \--differs--> Finished(Miscompare)
//! ```
//! A reset ends it before its next step. An exchange is one module I/O, so never half done by that.

use usurp_reactor::mem::{Buf, BufPool};

use crate::contract::{Caps, Geometry, Lba, Queue};
use crate::io::{Done, Io, Op, Status};

/// What the module is asked next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The caller's blocks and buffer, as this operation.
    Native(Op),
    /// Write made-up data, as much as the piece holds.
    Fill,
    /// Read what is to be compared.
    Compare,
    /// Write, the compare having been equal.
    Exchange,
    /// Flush, for FUA.
    Flush,
}

/// What the front queue has to do with a work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: the module has it.
    Submitted,
    /// Try its next step again at the next opportunity.
    Wait,
    /// It is done.
    Finished(Status),
}

/// An emulated I/O.
pub struct Work {
    /// The caller's; its buffer is with the module during `Native`.
    io: Io,
    /// What comes next, or is with the module.
    step: Step,
    /// Whether a flush comes last.
    flush_after: bool,
    /// Blocks filled.
    at: u64,
    /// Blocks of the fill that is with the module.
    chunk: u64,
    /// Scratch memory; none before it is needed, and while it is with the module.
    piece: Buf,
    /// Whether it holds a piece, here or with the module, with its data made up.
    filled: bool,
    /// A reset came.
    aborted: bool,
}

impl Work {
    /// The first step of `io`, given what the module can do.
    pub fn new(io: Io, caps: &Caps, flush_after: bool) -> Work {
        let mut work = Work {
            io,
            step: Step::Fill,
            flush_after,
            at: 0,
            chunk: 0,
            piece: Buf::none(),
            filled: false,
            aborted: false,
        };
        work.plan(caps);
        work
    }

    /// Picks the first step.
    fn plan(&mut self, caps: &Caps) {
        let op = self.io.op;
        let native = Step::Native(if caps.fua { op } else { op.without_fua() });
        self.step = match op {
            Op::Unmap if caps.unmap => native,
            Op::WriteZeroes { .. } if caps.write_zeroes => native,
            Op::WriteZeroes { unmap: true, fua } if caps.unmap && caps.unmap_zeroes => {
                // An unmap has no FUA, whatever the module does for writes.
                self.flush_after |= fua && caps.flush;
                Step::Native(Op::Unmap)
            }
            Op::WriteSame { .. } if caps.write_same => native,
            Op::CompareAndWrite { .. } if caps.compare_and_write => native,
            Op::CompareAndWrite { .. } => Step::Compare,
            Op::Write { .. } => native,
            _ => Step::Fill,
        };
    }

    /// Lets it end before its next step.
    pub fn abort(&mut self) {
        self.aborted = true;
    }

    /// Whether it is to end before its next step.
    pub fn is_aborted(&self) -> bool {
        self.aborted
    }

    /// Submits the next step to the module, if there is scratch memory and room.
    pub fn step(
        &mut self,
        index: u64,
        geometry: &Geometry,
        caps: &Caps,
        scratch: &mut Option<BufPool>,
        module: &mut dyn Queue,
    ) -> Next {
        if self.aborted {
            return Next::Finished(Status::Aborted);
        }
        let write = Op::Write { fua: self.io.op.fua() && caps.fua };
        let (lba, blocks) = (self.io.lba, self.io.blocks);
        let io = match self.step {
            Step::Native(op) => Io::new(op, lba, blocks, self.io.buf.take(), index),
            Step::Flush => Io::new(Op::Flush, Lba(0), 0, Buf::none(), index),
            Step::Exchange => Io::new(write, lba, blocks, self.piece.take(), index),
            Step::Compare | Step::Fill => {
                if !self.has_piece(geometry, scratch) {
                    return Next::Wait;
                }
                if self.step == Step::Compare {
                    Io::new(Op::Read, lba, blocks, self.piece.take(), index)
                } else {
                    let most = self.piece.len() as u64 / u64::from(geometry.block_size);
                    self.chunk = most.min(blocks - self.at);
                    let lba = Lba(lba.0 + self.at);
                    Io::new(write, lba, self.chunk, self.piece.take(), index)
                }
            }
        };
        match module.submit(io) {
            Ok(()) => Next::Submitted,
            Err(io) => {
                self.put_back(io.complete(Status::Busy).buf);
                Next::Wait
            }
        }
    }

    /// Takes a piece of scratch memory, and makes its data up, once.
    fn has_piece(&mut self, geometry: &Geometry, scratch: &mut Option<BufPool>) -> bool {
        if self.filled {
            return true;
        }
        let pool = scratch.as_mut().expect("complete() made scratch for whatever is emulated");
        let Some(piece) = pool.take(pool.max_len()) else { return false };
        self.piece = piece;
        self.filled = true;
        let size = geometry.block_size as usize;
        let target = self.piece.as_mut_slice();
        match self.io.op {
            Op::WriteSame { .. } => {
                let block = &self.io.buf.as_slice()[..size];
                target.chunks_exact_mut(size).for_each(|chunk| chunk.copy_from_slice(block));
            }
            Op::WriteZeroes { .. } | Op::Unmap => target.fill(0),
            _ => {}
        }
        true
    }

    /// Puts the buffer where the step took it from.
    fn put_back(&mut self, buf: Buf) {
        match self.step {
            Step::Native(_) => self.io.buf = buf,
            Step::Fill | Step::Compare | Step::Exchange => self.piece = buf,
            Step::Flush => assert!(buf.is_none(), "a flush came back with a buffer"),
        }
    }

    /// Takes the module's completion of a step.
    pub fn on_done(
        &mut self,
        done: Done,
        geometry: &Geometry,
        caps: &mut Caps,
        has_scratch: bool,
    ) -> Next {
        let status = done.status;
        self.put_back(done.buf);
        if status == Status::NotSupported && has_scratch && self.falls_back(caps) {
            return if self.io.op == Op::Unmap && !caps.unmap_zeroes {
                Next::Finished(Status::Ok)
            } else {
                Next::Wait
            };
        }
        if status != Status::Ok {
            return Next::Finished(status);
        }
        match self.step {
            Step::Flush => return Next::Finished(Status::Ok),
            Step::Fill => {
                self.at += self.chunk;
                assert!(self.at <= self.io.blocks, "filled beyond the end");
                if self.at < self.io.blocks {
                    return Next::Wait;
                }
            }
            Step::Compare => return self.compare(geometry),
            Step::Native(_) | Step::Exchange => {}
        }
        if self.flush_after {
            self.step = Step::Flush;
            return Next::Wait;
        }
        Next::Finished(Status::Ok)
    }

    /// After a `NotSupported`: remembers it in `caps` and plans anew. False if there is no way.
    fn falls_back(&mut self, caps: &mut Caps) -> bool {
        match self.step {
            Step::Native(Op::Unmap) => caps.unmap = false,
            Step::Native(Op::WriteZeroes { .. }) => caps.write_zeroes = false,
            _ => return false,
        }
        self.plan(caps);
        true
    }

    /// Compares what was read with the first half of the caller's buffer.
    fn compare(&mut self, geometry: &Geometry) -> Next {
        let len = geometry.bytes(self.io.blocks).expect("range checked") as usize;
        let caller = &self.io.buf.as_slice()[..2 * len];
        let (expected, new) = caller.split_at(len);
        let found = &mut self.piece.as_mut_slice()[..len];
        if found != expected {
            let differs = found.iter().zip(expected).position(|(a, b)| a != b);
            let offset = differs.expect("unequal slices differ somewhere") as u32;
            return Next::Finished(Status::Miscompare { offset });
        }
        found.copy_from_slice(new);
        self.step = Step::Exchange;
        Next::Wait
    }

    /// Gives the scratch memory back and ends the caller's I/O.
    pub fn end(mut self, status: Status, scratch: &mut Option<BufPool>) -> Done {
        if self.filled {
            assert!(!self.piece.is_none(), "the piece is still with the module");
            scratch.as_mut().expect("has_piece took it from there").give(self.piece.take());
        }
        self.io.complete(status)
    }
}
