//! INQUIRY: standard data and vital product data (SPC-4 INQUIRY and vital product
//! data parameters; SBC-3 likewise).
//!
//! Owns: the names of the unit, the pages. Never does: report a limit of its own; `limits.rs` has
//! them.
//!
//! ```text
//!   page 83:  NAA 6            binary  LU    naa
//!             T10 vendor id    ASCII   LU    vendor(8) product(16) serial
//!             relative port    binary  port  PIV, SRP
//!             EUI-64, 16 bytes binary  port  PIV, SRP: identifier extension, GUID
//! ```
//!
//! Invariants: page 00 lists exactly the pages of `PAGES`, ascending, and each has a builder there.
//! Page 86 comes with the handling of task attributes, B3 and target port groups with ALUA.

use crate::lu::{Call, Lu, LuConfig, respond};
use crate::sense::Sense;
use crate::step::{Builder, Reply, Step, data_in};

/// The longest serial number, in bytes.
pub const SERIAL_BYTES_MAX: usize = 64;

/// Bytes of standard data: up to the reserved bytes after the version descriptors.
const STANDARD_BYTES: usize = 96;
/// SPC-4.
const VERSION: u8 = 0x06;
/// HISUP, and response data format 2.
const FORMAT: u8 = 0x12;
/// SAM-5, SRP, SPC-4, SBC-3, each without a claim to a revision.
const VERSION_DESCRIPTORS: [u16; 4] = [0x00A0, 0x0940, 0x0460, 0x04C0];
/// PROTOCOL IDENTIFIER of SRP (SPC-4, protocol identifiers), in the high nibble.
const SRP: u8 = 0x40;
const CODE_SET_BINARY: u8 = 0x01;
const CODE_SET_ASCII: u8 = 0x02;
/// PIV = 1, association target port.
const OF_PORT: u8 = 0x90;

/// Page code, and what appends its body.
type Page = (u8, fn(&Lu, &mut Builder<'_>));

/// The VPD pages, ascending.
const PAGES: [Page; 6] = [
    (0x00, supported_pages),
    (0x80, unit_serial_number),
    (0x83, device_identification),
    (0xB0, block_limits),
    (0xB1, block_device_characteristics),
    (0xB2, logical_block_provisioning),
];

/// Names and designators, padded as they are sent.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// T10 VENDOR IDENTIFICATION.
    vendor: [u8; 8],
    /// PRODUCT IDENTIFICATION.
    product: [u8; 16],
    /// PRODUCT REVISION LEVEL.
    revision: [u8; 4],
    /// Serial number; the first `serial_len` bytes count.
    serial: [u8; SERIAL_BYTES_MAX],
    /// Bytes of the serial number, 1 to `SERIAL_BYTES_MAX`.
    serial_len: u8,
    /// NAA 6 designator.
    naa: [u8; 16],
    /// RELATIVE TARGET PORT IDENTIFIER.
    rel_port_id: u16,
    /// SRP target port identifier.
    target_port: [u8; 16],
}

fn pad<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [b' '; N];
    out[..text.len()].copy_from_slice(text.as_bytes());
    out
}

impl Identity {
    /// From a configuration that was checked.
    pub(crate) fn new(config: &LuConfig) -> Identity {
        Identity {
            vendor: pad(&config.vendor),
            product: pad(&config.product),
            revision: pad(&config.revision),
            serial: pad(&config.serial),
            serial_len: config.serial.len() as u8,
            naa: config.naa,
            rel_port_id: config.rel_port_id,
            target_port: config.target_port,
        }
    }

    fn serial(&self) -> &[u8] {
        &self.serial[..usize::from(self.serial_len)]
    }
}

pub(crate) fn inquiry(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let evpd = call.cdb.byte(1) & 0x01 != 0;
    let page = call.cdb.byte(2);
    let allocation = u32::from(call.cdb.be16(3));
    let result = if evpd {
        vpd(lu, page, allocation, call)
    } else if page != 0 {
        Err(Sense::cdb_field(2))
    } else {
        Ok(data_in(call.scratch, call.task.data_in_len, allocation, |out| standard(lu, out)))
    };
    respond(call.task, result)
}

fn standard(lu: &Lu, out: &mut Builder<'_>) {
    let id = &lu.identity;
    let rmb = u8::from(lu.removable) << 7;
    // Byte 5: no SCC, ALUA, third-party copy or protection. Byte 6: MULTIP. Byte 7: CMDQUE.
    out.push(&[0x00, rmb, VERSION, FORMAT, (STANDARD_BYTES - 5) as u8, 0x00, 0x10, 0x02]);
    out.push(&id.vendor);
    out.push(&id.product);
    out.push(&id.revision);
    out.zeros(58 - 36);
    for descriptor in VERSION_DESCRIPTORS {
        out.push(&descriptor.to_be_bytes());
    }
    out.zeros(STANDARD_BYTES - out.len());
}

/// Standard data of a LUN without a logical unit: qualifier 3, type 1Fh (SPC-4 INQUIRY).
pub(crate) fn absent(scratch: &mut [u8], data_in_len: u32, allocation: u32) -> Reply {
    data_in(scratch, data_in_len, allocation, |out| {
        out.push(&[0x7F, 0, VERSION, FORMAT, 36 - 5, 0, 0, 0x02]);
        out.push(&[b' '; 36 - 8]);
    })
}

fn vpd(lu: &Lu, page: u8, allocation: u32, call: &mut Call<'_>) -> Result<Reply, Sense> {
    let body = PAGES.iter().find(|(code, _)| *code == page).ok_or(Sense::cdb_field(2))?.1;
    Ok(data_in(call.scratch, call.task.data_in_len, allocation, |out| {
        out.push(&[0x00, page, 0, 0]);
        body(lu, out);
        let length = (out.len() - 4) as u16;
        out.set(2, &length.to_be_bytes());
    }))
}

fn supported_pages(_lu: &Lu, out: &mut Builder<'_>) {
    for (code, _) in PAGES {
        out.push(&[code]);
    }
}

fn unit_serial_number(lu: &Lu, out: &mut Builder<'_>) {
    out.push(lu.identity.serial());
}

fn device_identification(lu: &Lu, out: &mut Builder<'_>) {
    let id = &lu.identity;
    out.push(&[CODE_SET_BINARY, 0x03, 0, 16]);
    out.push(&id.naa);
    // As SPC-4, T10 vendor ID based designator, recommends: vendor, then product and serial number.
    let length = id.vendor.len() + id.product.len() + id.serial().len();
    out.push(&[CODE_SET_ASCII, 0x01, 0, length as u8]);
    out.push(&id.vendor);
    out.push(&id.product);
    out.push(id.serial());
    out.push(&[SRP | CODE_SET_BINARY, OF_PORT | 0x04, 0, 4, 0, 0]);
    out.push(&id.rel_port_id.to_be_bytes());
    // The target port identifier has the form of a 16-byte EUI-64 designator:
    // identifier extension, then EUI-64 (SPC-4, EUI-64 based 16-byte designator).
    out.push(&[SRP | CODE_SET_BINARY, OF_PORT | 0x02, 0, 16]);
    out.push(&id.target_port);
}

fn block_limits(lu: &Lu, out: &mut Builder<'_>) {
    let limits = &lu.limits;
    // WSNZ: a WRITE SAME of 0 blocks is refused. No COMPARE AND WRITE yet.
    out.push(&[0x01, 0]);
    out.push(&limits.granularity_blocks.to_be_bytes());
    out.push(&limits.transfer_blocks.to_be_bytes());
    out.push(&limits.optimal_blocks.to_be_bytes());
    out.zeros(4); // MAXIMUM PREFETCH LENGTH
    out.push(&limits.unmap_blocks.to_be_bytes());
    out.push(&limits.unmap_descriptors.to_be_bytes());
    out.push(&limits.unmap_granularity_blocks.to_be_bytes());
    // UGAVALID, alignment 0.
    let alignment: u32 = if limits.unmap_granularity_blocks == 0 { 0 } else { 1 << 31 };
    out.push(&alignment.to_be_bytes());
    out.push(&limits.write_same_blocks.to_be_bytes());
    out.zeros(64 - 44);
}

fn block_device_characteristics(lu: &Lu, out: &mut Builder<'_>) {
    // 0001h: the medium does not turn; 0000h: the rate is not known.
    let rate: u16 = if lu.geometry.rotational { 0 } else { 1 };
    out.push(&rate.to_be_bytes());
    out.zeros(64 - 6);
}

fn logical_block_provisioning(lu: &Lu, out: &mut Builder<'_>) {
    let thin = lu.caps.unmap;
    // LBPU, LBPWS, LBPWS10 and, in bits 4:2, LBPRZ.
    let flags = if thin { 0xE0 | u8::from(lu.caps.unmap_zeroes) << 2 } else { 0 };
    out.push(&[0, flags, if thin { 2 } else { 0 }, 0]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, lu, plain};

    fn page(bench: &mut Bench, page: u8) -> Vec<u8> {
        bench.data(&[0x12, 1, page, 1, 0, 0], 256)
    }

    #[test]
    fn standard_data_are_as_the_standard_lays_them_out() {
        let data = Bench::new(plain()).data(&[0x12, 0, 0, 0, 255, 0], 255);
        let mut want = vec![0x00, 0x00, 0x06, 0x12, 91, 0x00, 0x10, 0x02];
        want.extend(b"USURP   Virtual Disk    0001");
        want.resize(58, 0);
        want.extend([0x00, 0xA0, 0x09, 0x40, 0x04, 0x60, 0x04, 0xC0]);
        want.resize(96, 0);
        assert_eq!(data, want);
    }

    #[test]
    fn a_removable_unit_says_so() {
        let mut config = plain();
        config.removable = true;
        assert_eq!(Bench::new(config).data(&[0x12, 0, 0, 0, 255, 0], 255)[1], 0x80);
    }

    #[test]
    fn the_allocation_length_has_two_bytes_and_zero_is_no_error() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.data(&[0x12, 0, 0, 1, 0, 0], 1000).len(), 96);
        assert_eq!(bench.data(&[0x12, 0, 0, 0, 5, 0], 1000), [0, 0, 6, 0x12, 91]);
        let reply = bench.reply(&[0x12, 0, 0, 0, 0, 0], 0, 1000);
        assert_eq!(reply, Reply::good(0, 0));
    }

    #[test]
    fn a_page_code_without_evpd_and_an_unknown_page_are_refused() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.sense(&[0x12, 0, 0x80, 0, 255, 0], 0, 255), Sense::cdb_field(2));
        assert_eq!(bench.sense(&[0x12, 1, 0x86, 0, 255, 0], 0, 255), Sense::cdb_field(2));
        let cmddt = bench.sense(&[0x12, 2, 0, 0, 255, 0], 0, 255);
        assert_eq!(cmddt, Sense::cdb_field(1).at_bit(1));
    }

    #[test]
    fn page_00_lists_exactly_the_pages_that_exist() {
        let mut bench = Bench::new(plain());
        let list = page(&mut bench, 0x00);
        assert_eq!(list, [0, 0, 0, 6, 0x00, 0x80, 0x83, 0xB0, 0xB1, 0xB2]);
        for code in 0..=0xFF {
            let reply = bench.reply(&[0x12, 1, code, 1, 0, 0], 0, 256);
            assert_eq!(reply.sense.is_none(), list[4..].contains(&code), "page {code:#x}");
        }
    }

    #[test]
    fn page_80_is_the_serial_number() {
        assert_eq!(page(&mut Bench::new(plain()), 0x80), b"\x00\x80\x00\x06SN1234");
    }

    #[test]
    fn page_83_has_the_unit_and_its_port() {
        let mut want = vec![0x00, 0x83, 0, 20 + 34 + 8 + 20];
        want.extend([0x01, 0x03, 0, 16]);
        want.extend([0x60, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        want.extend([0x02, 0x01, 0, 30]);
        want.extend(b"USURP   Virtual Disk    SN1234");
        want.extend([0x41, 0x94, 0, 4, 0, 0, 0, 7]);
        want.extend([0x41, 0x92, 0, 16]);
        want.extend([0xE1; 8]);
        want.extend([0xF2; 8]);
        assert_eq!(page(&mut Bench::new(plain()), 0x83), want);
    }

    #[test]
    fn page_b0_of_a_fat_unit_has_no_unmap() {
        let mut want = vec![0x00, 0xB0, 0, 0x3C, 0x01, 0, 0, 8];
        want.extend([0, 0, 0x08, 0x00]); // transfer: 2048 blocks
        want.extend([0, 0, 0, 64]); // optimal
        want.resize(36, 0);
        want.extend([0, 0, 0, 0, 0, 2, 0, 0]); // WRITE SAME: 64 MiB
        want.resize(64, 0);
        assert_eq!(page(&mut Bench::new(plain()), 0xB0), want);
    }

    #[test]
    fn pages_b0_and_b2_of_a_thin_unit() {
        let mut bench = Bench::new(lu(|config| {
            config.caps.unmap = true;
            config.caps.unmap_zeroes = true;
            config.geometry.unmap_granularity_blocks = 128;
        }));
        let data = page(&mut bench, 0xB0);
        let unmap = [0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 255, 0, 0, 0, 128, 0x80, 0, 0, 0];
        assert_eq!(data[20..36], unmap);
        assert_eq!(data[36..44], (1u64 << 21).to_be_bytes());
        assert_eq!(page(&mut bench, 0xB2), [0, 0xB2, 0, 4, 0, 0xE4, 2, 0]);
    }

    #[test]
    fn pages_b1_and_b2_of_a_fat_unit() {
        let mut want = vec![0x00, 0xB1, 0, 0x3C, 0, 1];
        want.resize(64, 0);
        assert_eq!(page(&mut Bench::new(plain()), 0xB1), want);
        assert_eq!(page(&mut Bench::new(plain()), 0xB2), [0, 0xB2, 0, 4, 0, 0, 0, 0]);
    }
}
