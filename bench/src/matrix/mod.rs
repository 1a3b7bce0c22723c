//! `usurp-matrix`, the tool behind `make bench`: measures the whole path, `usurp` and `usurp-perf`
//! as two pinned processes over the shm fabric, so that anyone can repeat it on their own machine.
//!
//! ```text
//!   for each round:  start usurp (bare: time and memory) -> stop
//!                    start usurp (bench LUNs)                     machine: memcpy
//!                    for each job, in an order that rotates:
//!                       probe -> snapshot -> usurp-perf -> snapshot -> probe --> Run
//!                    stop usurp, which must end well
//!   runs --filed by placement, disturbed ones set apart--> rows --> table, latest.json, latest.md
//! ```
//! Jobs are interleaved, so that drift of the machine hits all of them alike. A job is one line of
//! [`jobs`] and, where a peer was measured at the same work, one of [`reference`](mod@reference).
//! Never: a figure without the state of the machine that it was taken in.

pub mod args;
pub mod copies;
pub mod disturb;
pub mod drive;
pub mod format;
pub mod guard;
pub mod image;
pub mod jobs;
pub mod machine;
pub mod probe;
pub mod record;
pub mod reference;
pub mod rounds;
pub mod rows;
pub mod server;
pub mod stats;
pub mod table;

use std::path::{Path, PathBuf};

/// What ends a bench early.
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    /// The options cannot be meant.
    #[error("{0}")]
    Usage(String),
    /// This machine lacks something that measuring needs.
    #[error("{0}")]
    Machine(String),
    /// The target did not start, or did not end well.
    #[error("the target {0}")]
    Target(String),
    /// A run did not end well.
    #[error("{job}: usurp-perf {why}")]
    Load {
        /// The job's name.
        job: String,
        /// What happened.
        why: String,
    },
    /// A local file.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl MatrixError {
    /// The exit code of `usurp-matrix`: 2 for a wrong command line, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            MatrixError::Usage(_) => 2,
            _ => 1,
        }
    }

    /// For `map_err`: an I/O error at `path`.
    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> MatrixError {
        |source| MatrixError::File { path: path.to_path_buf(), source }
    }
}
