//! What threads say to each other: the control thread to reactors, reactors to reactors, reactors
//! to the control thread.
//!
//! Owns the message types only. A message moves its contents: nothing in one is shared with the
//! sender afterwards, except immutable configuration behind an `Arc`. Everything that must be
//! allocated for a channel is allocated by the control thread and travels inside
//! [`ToReactor::Adopt`]; it comes back in [`ToControl::Closed`] to be freed there.

use std::sync::Arc;

use usurp_fabric::ConnId;

use crate::conn::Conn;
use crate::luns::LunMap;

/// Index of a reactor of this process, in the order of its core list.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReactorId(pub u16);

/// Index of an I_T nexus; assigned by the control thread, not reused while a channel of it lives.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct NexusId(pub u32);

/// What a reactor must know of the nexus a new channel belongs to.
#[derive(Clone, Debug)]
pub struct NexusInfo {
    /// The nexus.
    pub id: NexusId,
    /// LUNs that this host may see, and the logical unit behind each.
    pub luns: Arc<LunMap>,
    /// The reactor of the nexus's first channel: it alone keeps the nexus's unit attentions.
    pub home: bool,
}

/// Which commands a task management function takes down.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All commands of one nexus on the logical unit: ABORT TASK SET.
    Nexus(NexusId),
    /// All commands of all nexuses on the logical unit: CLEAR TASK SET; the origin is told nothing,
    /// the others get a unit attention.
    Clear(NexusId),
    /// The same, and the logical unit is reset: LOGICAL UNIT RESET. Carries the nexus that asked.
    Reset(NexusId),
}

/// Names one task management function while other reactors work on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TmfRef {
    /// The reactor that will answer the initiator.
    pub reactor: ReactorId,
    /// Slot in that reactor's table.
    pub slot: u16,
    /// Distinguishes successive users of the slot.
    pub serial: u32,
}

/// To a reactor.
pub enum ToReactor<E> {
    /// Take over a channel whose login was accepted; post its receives and say so by
    /// [`ToControl::Adopted`].
    Adopt {
        /// The connection, as the connection manager knows it.
        conn: ConnId,
        /// The transport's half of the channel.
        endpoint: E,
        /// The channel with all its tables, allocated by the control thread.
        channel: Box<Conn>,
    },
    /// The initiator has our LOGIN_RSP: early IUs may be served now.
    Established {
        /// The connection.
        conn: ConnId,
    },
    /// Bring the channel down. With `grace`, commands already begun are answered first (bounded by
    /// the path's grace time); without, the connection is gone already.
    Close {
        /// The connection.
        conn: ConnId,
        /// Whether answers can still reach the initiator.
        grace: bool,
    },
    /// Another reactor's task management function: abort what is in scope here, then answer.
    Abort {
        /// Who asks.
        tmf: TmfRef,
        /// The logical unit.
        lu: u16,
        /// What to abort.
        scope: Scope,
    },
    /// Everything in scope of that function has ended at the sender's reactor.
    AbortDone {
        /// The function.
        tmf: TmfRef,
        /// Who answers.
        from: ReactorId,
    },
    /// A logical unit was stopped or started by START STOP UNIT on another reactor.
    Stopped {
        /// The logical unit.
        lu: u16,
        /// Its state now.
        stopped: bool,
    },
    /// No channel is left: end the loop.
    Shutdown,
}

/// To the control thread.
pub enum ToControl<E> {
    /// The channel stands ready with its receives posted; the login may be answered.
    Adopted {
        /// The connection.
        conn: ConnId,
    },
    /// The channel could not be set up.
    Refused {
        /// The connection.
        conn: ConnId,
        /// The transport's half, to be destroyed.
        endpoint: Option<E>,
        /// The channel's memory.
        channel: Box<Conn>,
        /// What went wrong.
        why: String,
    },
    /// The reactor wants the peer disconnected (protocol error, logout, transport error).
    Disconnect {
        /// The connection.
        conn: ConnId,
        /// Why, for the log.
        why: &'static str,
    },
    /// The channel is gone: no work request and no bdev I/O of it is left.
    Closed {
        /// The connection.
        conn: ConnId,
        /// The transport's half, to be destroyed.
        endpoint: E,
        /// The channel's memory.
        channel: Box<Conn>,
    },
    /// SIGTERM or SIGINT.
    Stop,
}
