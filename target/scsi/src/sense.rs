//! Sense data: a small value that is rendered only when it is sent.
//!
//! Owns: sense keys, the additional sense codes we use, both wire formats (SPC-4, sense data).
//! Never does: decide when a command fails.
//!
//! ```text
//!  fixed, 18 bytes:   70|VALID  0  key  info(4)  0A  0(4)  ASC ASCQ  0  SKS(3)
//!  descriptor:        72  key  ASC  ASCQ  0 0 0  len  [00 0A 80 0 info(8)] [02 06 0 0 SKS(3) 0]
//! ```
//!
//! Invariant: never longer than [`SENSE_BYTES_MAX`], and a claimed length is always present.

/// The longest sense data that [`Sense::bytes`] makes: header, information and SKS descriptors.
pub const SENSE_BYTES_MAX: usize = 28;

const FIXED_BYTES: usize = 18;
const SKSV: u8 = 0x80;
const SKS_IN_CDB: u8 = 0x40;
const SKS_BIT_VALID: u8 = 0x08;

/// Sense keys (SPC-4) that this device server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Key {
    /// Nothing to report.
    NoSense = 0x0,
    /// The logical unit cannot be accessed.
    NotReady = 0x2,
    /// A flaw in the medium or in the recorded data.
    MediumError = 0x3,
    /// A failure that no retry mends.
    HardwareError = 0x4,
    /// The CDB or its parameter list is wrong.
    IllegalRequest = 0x5,
    /// Something happened that the nexus has to know first.
    UnitAttention = 0x6,
    /// The block is protected from this access.
    DataProtect = 0x7,
    /// The device server gave the command up; a retry may work.
    AbortedCommand = 0xB,
    /// The data differ from what is on the medium.
    Miscompare = 0xE,
}

/// Sense data of one command. 16 bytes, so that `Option<Sense>` fits a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// INFORMATION field; valid only with `has_information`.
    information: u64,
    /// Which byte of the CDB or of the parameter list is wrong; valid only with `sks != 0`.
    field: u16,
    /// First byte of the sense-key specific field (SPC-4, field pointer); 0 = not there.
    sks: u8,
    /// Sense key.
    key: Key,
    /// ADDITIONAL SENSE CODE.
    asc: u8,
    /// ADDITIONAL SENSE CODE QUALIFIER.
    ascq: u8,
    /// Whether `information` is sent.
    has_information: bool,
}

const _: () = assert!(size_of::<Option<Sense>>() == 16, "a reply carries one; keep it small");

impl Sense {
    /// NO SENSE.
    pub const NONE: Sense = Sense::new(Key::NoSense, 0x00, 0x00);
    /// INVALID COMMAND OPERATION CODE.
    pub const INVALID_OPCODE: Sense = Sense::new(Key::IllegalRequest, 0x20, 0x00).in_cdb(0);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub const LBA_OUT_OF_RANGE: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x00);
    /// LOGICAL UNIT NOT SUPPORTED.
    pub const LU_NOT_SUPPORTED: Sense = Sense::new(Key::IllegalRequest, 0x25, 0x00);
    /// PARAMETER LIST LENGTH ERROR.
    pub const LIST_LENGTH: Sense = Sense::new(Key::IllegalRequest, 0x1A, 0x00);
    /// SAVING PARAMETERS NOT SUPPORTED.
    pub const SAVING: Sense = Sense::new(Key::IllegalRequest, 0x39, 0x00);
    /// INVALID FIELD IN COMMAND INFORMATION UNIT: the buffer of the IU contradicts the CDB, or the
    /// IU is malformed.
    pub const INVALID_IU: Sense = Sense::new(Key::IllegalRequest, 0x0E, 0x03);
    /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED: stopped by START STOP UNIT.
    pub const STOPPED: Sense = Sense::new(Key::NotReady, 0x04, 0x02);
    /// UNRECOVERED READ ERROR.
    pub const READ_ERROR: Sense = Sense::new(Key::MediumError, 0x11, 0x00);
    /// WRITE ERROR.
    pub const WRITE_ERROR: Sense = Sense::new(Key::MediumError, 0x0C, 0x00);
    /// INTERNAL TARGET FAILURE.
    pub const INTERNAL: Sense = Sense::new(Key::HardwareError, 0x44, 0x00);
    /// WRITE PROTECTED.
    pub const WRITE_PROTECTED: Sense = Sense::new(Key::DataProtect, 0x27, 0x00);
    /// SPACE ALLOCATION FAILED WRITE PROTECT: the thin bdev is full.
    pub const NO_SPACE: Sense = Sense::new(Key::DataProtect, 0x27, 0x07);
    /// I/O PROCESS TERMINATED.
    pub const ABORTED: Sense = Sense::new(Key::AbortedCommand, 0x00, 0x06);
    /// DATA PHASE ERROR: for the caller, when an RDMA READ or WRITE failed.
    pub const DATA_PHASE: Sense = Sense::new(Key::AbortedCommand, 0x4B, 0x00);
    /// OVERLAPPED COMMANDS ATTEMPTED: for the caller, when a tag is in use.
    pub const OVERLAPPED: Sense = Sense::new(Key::AbortedCommand, 0x4E, 0x00);
    /// MISCOMPARE DURING VERIFY OPERATION.
    pub const MISCOMPARE: Sense = Sense::new(Key::Miscompare, 0x1D, 0x00);

    /// Sense data without information or field pointer.
    pub const fn new(key: Key, asc: u8, ascq: u8) -> Sense {
        Sense { information: 0, field: 0, sks: 0, key, asc, ascq, has_information: false }
    }

    /// INVALID FIELD IN CDB, pointing at `byte`.
    pub const fn cdb_field(byte: u16) -> Sense {
        Sense::new(Key::IllegalRequest, 0x24, 0x00).in_cdb(byte)
    }

    /// INVALID FIELD IN PARAMETER LIST, pointing at `byte`.
    pub const fn list_field(byte: u16) -> Sense {
        let mut sense = Sense::new(Key::IllegalRequest, 0x26, 0x00);
        sense.sks = SKSV;
        sense.field = byte;
        sense
    }

    /// With the sense-key specific field pointing at `byte` of the CDB (SPC-4, field pointer).
    pub const fn in_cdb(mut self, byte: u16) -> Sense {
        self.sks = SKSV | SKS_IN_CDB;
        self.field = byte;
        self
    }

    /// With the field pointer's BIT POINTER: the field's most significant bit.
    pub const fn at_bit(mut self, bit: u8) -> Sense {
        assert!(self.sks != 0, "a bit pointer needs a field pointer");
        assert!(bit < 8, "a bit of one byte");
        self.sks |= SKS_BIT_VALID | bit;
        self
    }

    /// With a valid INFORMATION field.
    pub const fn with_information(mut self, information: u64) -> Sense {
        self.information = information;
        self.has_information = true;
        self
    }

    /// The sense key.
    pub const fn key(&self) -> Key {
        self.key
    }

    /// ADDITIONAL SENSE CODE and its qualifier.
    pub const fn code(&self) -> (u8, u8) {
        (self.asc, self.ascq)
    }

    /// The INFORMATION field if it is valid.
    pub fn information(&self) -> Option<u64> {
        self.has_information.then_some(self.information)
    }

    /// The sense data as sent, and how many of the bytes count. `desc_format` is D_SENSE of the
    /// control mode page, or DESC of REQUEST SENSE. Information that needs more than 32 bits goes
    /// out in descriptor format whatever was asked (reference 4.10): fixed format cannot carry it.
    pub fn bytes(&self, desc_format: bool) -> ([u8; SENSE_BYTES_MAX], usize) {
        let wide = self.has_information && self.information > u64::from(u32::MAX);
        if desc_format || wide { self.descriptor() } else { self.fixed() }
    }

    fn fixed(&self) -> ([u8; SENSE_BYTES_MAX], usize) {
        let mut out = [0; SENSE_BYTES_MAX];
        out[0] = 0x70;
        out[2] = self.key as u8;
        if self.has_information {
            let narrow =
                u32::try_from(self.information).expect("bytes() sends wide ones otherwise");
            out[0] |= 0x80;
            out[3..7].copy_from_slice(&narrow.to_be_bytes());
        }
        out[7] = (FIXED_BYTES - 8) as u8;
        out[12] = self.asc;
        out[13] = self.ascq;
        self.put_sks(&mut out[15..18]);
        (out, FIXED_BYTES)
    }

    fn descriptor(&self) -> ([u8; SENSE_BYTES_MAX], usize) {
        let mut out = [0; SENSE_BYTES_MAX];
        out[..4].copy_from_slice(&[0x72, self.key as u8, self.asc, self.ascq]);
        let mut len = 8;
        if self.has_information {
            out[len..len + 4].copy_from_slice(&[0x00, 0x0A, 0x80, 0x00]);
            out[len + 4..len + 12].copy_from_slice(&self.information.to_be_bytes());
            len += 12;
        }
        if self.sks != 0 {
            out[len..len + 2].copy_from_slice(&[0x02, 0x06]);
            self.put_sks(&mut out[len + 4..len + 7]);
            len += 8;
        }
        out[7] = (len - 8) as u8;
        (out, len)
    }

    fn put_sks(&self, out: &mut [u8]) {
        if self.sks != 0 {
            out[0] = self.sks;
            out[1..3].copy_from_slice(&self.field.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(sense: Sense, desc: bool) -> Vec<u8> {
        let (bytes, len) = sense.bytes(desc);
        bytes[..len].to_vec()
    }

    #[test]
    fn fixed_format_has_eighteen_bytes() {
        let want = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x21, 0, 0, 0, 0, 0];
        assert_eq!(render(Sense::LBA_OUT_OF_RANGE, false), want);
    }

    #[test]
    fn fixed_format_carries_information_and_field_pointer() {
        let sense = Sense::cdb_field(0x0102).at_bit(3).with_information(0xA1B2_C3D4);
        let want =
            [0xF0, 0, 5, 0xA1, 0xB2, 0xC3, 0xD4, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xCB, 0x01, 0x02];
        assert_eq!(render(sense, false), want);
    }

    #[test]
    fn descriptor_format_carries_both_descriptors() {
        let sense = Sense::list_field(9).with_information(7);
        let want = [
            0x72, 5, 0x26, 0, 0, 0, 0, 20, 0x00, 0x0A, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0x02, 0x06,
            0, 0, 0x80, 0, 9, 0,
        ];
        assert_eq!(render(sense, true), want);
        assert_eq!(render(Sense::STOPPED, true), [0x72, 2, 4, 2, 0, 0, 0, 0]);
    }

    #[test]
    fn wide_information_forces_descriptor_format() {
        let sense = Sense::MISCOMPARE.with_information(1 << 32);
        let want = [0x72, 0xE, 0x1D, 0, 0, 0, 0, 12, 0, 0x0A, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(render(sense, false), want);
        assert_eq!(sense.information(), Some(1 << 32));
        assert_eq!(Sense::NONE.information(), None);
    }
}
