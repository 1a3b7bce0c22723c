//! Sense data, taken apart for decisions (is it a unit attention?) and for people (key, ASC/ASCQ in
//! words). Reads fixed (70h) and descriptor (72h) format, SPC-4 4.5; never trusts a length.

use std::fmt;

/// Sense key NOT READY.
pub const KEY_NOT_READY: u8 = 0x2;
/// Sense key ILLEGAL REQUEST.
pub const KEY_ILLEGAL_REQUEST: u8 = 0x5;
/// Sense key UNIT ATTENTION.
pub const KEY_UNIT_ATTENTION: u8 = 0x6;

/// The three numbers that sense data is about.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct SenseCode {
    /// Sense key, 0-15.
    pub key: u8,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
}

impl SenseCode {
    /// Reads either format; None when there is no sense data or its format is unknown.
    pub fn parse(sense: &[u8]) -> Option<SenseCode> {
        let byte = |at: usize| sense.get(at).copied().unwrap_or(0);
        match byte(0) & 0x7f {
            0x70 | 0x71 if sense.len() >= 3 => {
                Some(SenseCode { key: byte(2) & 0xf, asc: byte(12), ascq: byte(13) })
            }
            0x72 | 0x73 if sense.len() >= 4 => {
                Some(SenseCode { key: byte(1) & 0xf, asc: byte(2), ascq: byte(3) })
            }
            _ => None,
        }
    }

    /// True for UNIT ATTENTION: the command was not executed, and trying again is right.
    pub fn is_unit_attention(self) -> bool {
        self.key == KEY_UNIT_ATTENTION
    }
}

/// Sense data as an error message wants it: prints as nothing when there was none.
#[derive(Copy, Clone, Debug, Default)]
pub struct SenseText {
    /// None when the response carried no sense data that could be read.
    pub code: Option<SenseCode>,
}

impl SenseText {
    /// Reads sense bytes.
    pub fn new(sense: &[u8]) -> SenseText {
        SenseText { code: SenseCode::parse(sense) }
    }
}

impl fmt::Display for SenseText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(code) = self.code else { return Ok(()) };
        write!(f, ", {} {:02x}/{:02x}", key_words(code.key), code.asc, code.ascq)?;
        match asc_words(code.asc, code.ascq) {
            "" => Ok(()),
            words => write!(f, " {words}"),
        }
    }
}

/// The name of a sense key, SPC-4 table 48.
pub fn key_words(key: u8) -> &'static str {
    const NAMES: [&str; 16] = [
        "NO SENSE",
        "RECOVERED ERROR",
        "NOT READY",
        "MEDIUM ERROR",
        "HARDWARE ERROR",
        "ILLEGAL REQUEST",
        "UNIT ATTENTION",
        "DATA PROTECT",
        "BLANK CHECK",
        "VENDOR SPECIFIC",
        "COPY ABORTED",
        "ABORTED COMMAND",
        "reserved key Ch",
        "VOLUME OVERFLOW",
        "MISCOMPARE",
        "COMPLETED",
    ];
    NAMES[usize::from(key & 0xf)]
}

/// The codes an SRP target is likely to send; empty for others (the numbers are printed anyway).
pub fn asc_words(asc: u8, ascq: u8) -> &'static str {
    match (asc, ascq) {
        (0x04, 0x0a..=0x0c) => "(asymmetric access state)",
        (0x08, 0x00) => "(logical unit communication failure)",
        (0x0c, _) => "(write error)",
        (0x0e, 0x03) => "(invalid field in command information unit)",
        (0x11, _) => "(unrecovered read error)",
        (0x1a, 0x00) => "(parameter list length error)",
        (0x1d, 0x00) => "(miscompare during verify)",
        (0x20, 0x00) => "(invalid command operation code)",
        (0x21, 0x00) => "(LBA out of range)",
        (0x24, 0x00) => "(invalid field in CDB)",
        (0x25, 0x00) => "(logical unit not supported)",
        (0x26, _) => "(invalid field in parameter list)",
        (0x27, 0x00) => "(write protected)",
        (0x27, 0x07) => "(space allocation failed: the backing store is full)",
        (0x29, _) => "(power on or reset)",
        (0x2a, 0x09) => "(capacity data has changed)",
        (0x2f, 0x00) => "(commands cleared by another initiator)",
        (0x3f, 0x0e) => "(reported LUNs data has changed)",
        (0x44, 0x00) => "(internal target failure)",
        (0x4b, _) => "(data phase error)",
        (0x4e, 0x00) => "(overlapped commands attempted)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_give_the_same_code() {
        let mut fixed = [0u8; 18];
        fixed[0] = 0xf0;
        fixed[2] = 0x06;
        fixed[12] = 0x29;
        fixed[13] = 0x03;
        let descriptor = [0x72, 0x06, 0x29, 0x03, 0, 0, 0, 0];
        let want = SenseCode { key: 6, asc: 0x29, ascq: 3 };
        assert_eq!(SenseCode::parse(&fixed), Some(want));
        assert_eq!(SenseCode::parse(&descriptor), Some(want));
        assert!(want.is_unit_attention());
    }

    #[test]
    fn short_or_strange_sense_is_none_or_zeros_never_a_panic() {
        assert_eq!(SenseCode::parse(&[]), None);
        assert_eq!(SenseCode::parse(&[0x70]), None);
        assert_eq!(SenseCode::parse(&[0x12; 18]), None);
        let cut = SenseCode::parse(&[0x70, 0, 5, 0]);
        assert_eq!(cut, Some(SenseCode { key: 5, asc: 0, ascq: 0 }));
        assert_eq!(SenseText::new(&[]).to_string(), "");
    }
}
