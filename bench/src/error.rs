//! What can go wrong between `usurp-perf` and a target, as values: each names the peer's part in it
//! (LUN, CDB, status, sense) in words a person can act on, and maps to one documented exit code.
//!
//! Never: a panic for anything the target or the user did.

use std::path::PathBuf;

use crate::sense::SenseText;
use crate::verify::Mismatch;

/// Exit code of a run in which everything went well.
pub const EXIT_OK: u8 = 0;
/// Exit code when an I/O failed, data was wrong, or the target went away.
pub const EXIT_IO: u8 = 1;
/// Exit code for a command line that cannot be meant (clap uses the same).
pub const EXIT_USAGE: u8 = 2;
/// Exit code when no channel could be opened.
pub const EXIT_CONNECT: u8 = 3;

/// Everything that ends a command of `usurp-perf` early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict each other or the LU.
    #[error("{0}")]
    Usage(String),
    /// No connection: nobody listens, no permission, wrong protocol.
    #[error("cannot connect to {address}: {why}")]
    Connect {
        /// The address as the user gave it.
        address: String,
        /// The reason in words.
        why: String,
    },
    /// The target answered the login with SRP_LOGIN_REJ.
    #[error("{address} rejected the login of channel {channel}: {words} (reason {reason:#010x})")]
    Rejected {
        /// The address as the user gave it.
        address: String,
        /// Which channel was being opened, 0 = the first.
        channel: usize,
        /// The reason code, SRP r16a table 15.
        reason: u32,
        /// The same in words.
        words: &'static str,
    },
    /// The connection broke while it was in use.
    #[error("the target is gone: {0}")]
    PeerGone(String),
    /// The target sent something that SRP does not allow.
    #[error("the target broke the protocol: {0}")]
    Protocol(String),
    /// The target has no such LU, or does not show it to us.
    #[error("there is no LUN {0} for this initiator")]
    NoLun(u16),
    /// No answer to a command within its time.
    #[error("no answer to {what} on LUN {lun} within {seconds} s")]
    Timeout {
        /// The command in words.
        what: String,
        /// The LU it went to.
        lun: u16,
        /// How long was waited.
        seconds: u64,
    },
    /// A status other than GOOD.
    #[error("{what} on LUN {lun} failed: {}{sense}", status_words(*status))]
    Scsi {
        /// The command in words.
        what: String,
        /// The LU it went to.
        lun: u16,
        /// The SAM status byte.
        status: u8,
        /// The sense data in words; prints as nothing when there is none.
        sense: SenseText,
    },
    /// GOOD status, but not all the data (or more than there was room for).
    #[error("{what} on LUN {lun} has status GOOD but a residual of {residual} bytes {kind}")]
    Residual {
        /// The command in words.
        what: String,
        /// The LU it went to.
        lun: u16,
        /// Bytes short or over.
        residual: u32,
        /// "short" or "over".
        kind: &'static str,
    },
    /// What was read is not what was written.
    #[error("{0}")]
    Verify(Box<Mismatch>),
    /// The fabric refused: no memory, no queue, a bad parameter.
    #[error("the fabric refused to {what}: {why}")]
    Fabric {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
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

impl Error {
    /// The exit code of `usurp-perf` for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => EXIT_USAGE,
            Error::Connect { .. } | Error::Rejected { .. } => EXIT_CONNECT,
            _ => EXIT_IO,
        }
    }

    /// Shorthand for a usage error.
    pub fn usage(text: impl Into<String>) -> Error {
        Error::Usage(text.into())
    }
}

/// The SAM-5 name of a status byte.
pub fn status_words(status: u8) -> &'static str {
    match status {
        0x00 => "GOOD",
        0x02 => "CHECK CONDITION",
        0x04 => "CONDITION MET",
        0x08 => "BUSY",
        0x18 => "RESERVATION CONFLICT",
        0x28 => "TASK SET FULL",
        0x30 => "ACA ACTIVE",
        0x40 => "TASK ABORTED",
        _ => "an unknown status",
    }
}

/// What an SRP_LOGIN_REJ reason means, SRP r16a 6.4 (srp-reference 1.5).
pub fn reject_words(reason: u32) -> &'static str {
    match reason {
        0x0001_0000 => "it could not set up the channel and gives no reason",
        0x0001_0001 => "it has not enough resources for another channel",
        0x0001_0002 => "the requested initiator-to-target IU length is too large",
        0x0001_0003 => "unknown target port id, or this initiator is not allowed in",
        0x0001_0004 => "it does not support the requested data-buffer descriptor formats",
        0x0001_0005 => "it does not support several channels per initiator",
        0x0001_0006 => "this initiator has as many channels as it may have",
        _ => "reason unknown to this program",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_documented_exit_code() {
        let rejected =
            Error::Rejected { address: "shm:/x".into(), channel: 0, reason: 0x10003, words: "w" };
        assert_eq!(Error::usage("x").exit_code(), EXIT_USAGE);
        assert_eq!(rejected.exit_code(), EXIT_CONNECT);
        assert_eq!(Error::PeerGone("x".into()).exit_code(), EXIT_IO);
    }

    #[test]
    fn a_scsi_error_prints_command_status_and_sense() {
        let mut sense = [0u8; 18];
        sense[..3].copy_from_slice(&[0x70, 0, 0x05]);
        sense[12] = 0x24;
        let error = Error::Scsi {
            what: "READ(10)".into(),
            lun: 3,
            status: 2,
            sense: SenseText::new(&sense),
        };
        let text = error.to_string();
        assert!(text.contains("READ(10) on LUN 3"), "{text}");
        assert!(text.contains("ILLEGAL REQUEST"), "{text}");
        assert!(text.contains("24/00"), "{text}");
    }

    #[test]
    fn every_reject_reason_has_words_of_its_own() {
        let mut seen = std::collections::BTreeSet::new();
        for reason in 0x0001_0000..=0x0001_0006 {
            assert!(seen.insert(reject_words(reason)));
            assert!(!reject_words(reason).contains("unknown to this"));
        }
        assert!(reject_words(0).contains("unknown to this"));
    }
}
