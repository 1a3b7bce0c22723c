//! Builders for the CDBs this initiator sends, and readers for the parameter data that comes back.
//! No I/O. Readers take whatever length arrived: a missing byte reads as 0 or gives None.
//!
//! A CDB is 16 bytes here, zero-filled behind its real length, as SRP_CMD carries it (SRP r16a
//! 6.8).

/// A CDB of at most 16 bytes, zero-filled.
pub type Cdb = [u8; 16];

/// TEST UNIT READY.
pub fn test_unit_ready() -> Cdb {
    [0; 16]
}

/// INQUIRY; `page` None asks for the standard data, Some for a VPD page.
pub fn inquiry(page: Option<u8>, allocation: u16) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0x12;
    cdb[1] = u8::from(page.is_some());
    cdb[2] = page.unwrap_or(0);
    cdb[3..5].copy_from_slice(&allocation.to_be_bytes());
    cdb
}

/// REPORT LUNS, all but the well-known ones.
pub fn report_luns(allocation: u32) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0xa0;
    cdb[6..10].copy_from_slice(&allocation.to_be_bytes());
    cdb
}

/// READ CAPACITY(16).
pub fn read_capacity16(allocation: u32) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0x9e;
    cdb[1] = 0x10;
    cdb[10..14].copy_from_slice(&allocation.to_be_bytes());
    cdb
}

/// SYNCHRONIZE CACHE(10) of the whole LU.
pub fn synchronize_cache() -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0x35;
    cdb
}

/// READ(10) or WRITE(10) when the address and count fit it, else the 16-byte form.
pub fn read_write(write: bool, lba: u64, blocks: u32) -> Cdb {
    match (u32::try_from(lba), u16::try_from(blocks)) {
        (Ok(lba), Ok(blocks)) => read_write10(write, lba, blocks),
        _ => read_write16(write, lba, blocks),
    }
}

fn read_write10(write: bool, lba: u32, blocks: u16) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = if write { 0x2a } else { 0x28 };
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn read_write16(write: bool, lba: u64, blocks: u32) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = if write { 0x8a } else { 0x88 };
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

/// The name of the command in a CDB, for messages.
pub fn name(cdb: &[u8]) -> String {
    let first = cdb.first().copied().unwrap_or(0);
    let name = match first {
        0x00 => "TEST UNIT READY",
        0x03 => "REQUEST SENSE",
        0x12 => "INQUIRY",
        0x28 => "READ(10)",
        0x2a => "WRITE(10)",
        0x35 => "SYNCHRONIZE CACHE(10)",
        0x88 => "READ(16)",
        0x8a => "WRITE(16)",
        0x9e => "SERVICE ACTION IN(16)",
        0xa0 => "REPORT LUNS",
        other => return format!("command {other:02x}h"),
    };
    let address = match first {
        0x28 | 0x2a => be(cdb, 2, 4),
        0x88 | 0x8a => be(cdb, 2, 8),
        _ => return name.to_string(),
    };
    format!("{name} at LBA {address}")
}

/// The SRP/SAM LUN field of a small LUN: peripheral addressing below 256, flat space above.
pub fn lun_field(lun: u16) -> [u8; 8] {
    let method = if lun < 256 { 0 } else { 0x4000 };
    let word = (method | (lun & 0x3fff)).to_be_bytes();
    [word[0], word[1], 0, 0, 0, 0, 0, 0]
}

/// A big-endian number of `len` (<= 8) bytes at `at`; bytes that did not arrive are 0.
fn be(data: &[u8], at: usize, len: usize) -> u64 {
    (at..at + len).fold(0, |sum, i| sum << 8 | u64::from(data.get(i).copied().unwrap_or(0)))
}

/// Printable ASCII of a space-padded field.
fn text(data: &[u8], at: usize, len: usize) -> String {
    let end = data.len().min(at + len);
    let bytes = data.get(at.min(end)..end).unwrap_or(&[]);
    let chars =
        bytes.iter().map(|&b| if b.is_ascii_graphic() || b == b' ' { b as char } else { '?' });
    chars.collect::<String>().trim_matches([' ', '?']).to_string()
}

/// Standard INQUIRY data, SPC-4 6.4.2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// Peripheral qualifier, 0 = connected, 3 = no such LU.
    pub qualifier: u8,
    /// Peripheral device type, 0 = disk.
    pub device_type: u8,
    /// VERSION byte.
    pub version: u8,
    /// T10 vendor identification.
    pub vendor: String,
    /// Product identification.
    pub product: String,
    /// Product revision level.
    pub revision: String,
}

impl Inquiry {
    /// Reads at least the 36 mandatory bytes, or None.
    pub fn parse(data: &[u8]) -> Option<Inquiry> {
        let head = data.first_chunk::<36>()?;
        Some(Inquiry {
            qualifier: head[0] >> 5,
            device_type: head[0] & 0x1f,
            version: head[2],
            vendor: text(head, 8, 8),
            product: text(head, 16, 16),
            revision: text(head, 32, 4),
        })
    }

    /// True for an LU that is there.
    pub fn is_connected(&self) -> bool {
        self.qualifier == 0
    }
}

/// READ CAPACITY(16) data, as the benchmark needs it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of logical blocks.
    pub blocks: u64,
    /// Bytes per logical block: 512 to 65536, a power of two.
    pub block_size: u32,
    /// Thin provisioned (LBPME).
    pub thin: bool,
}

impl Capacity {
    /// Reads 32 bytes of READ CAPACITY(16) data; the error says what is wrong with them.
    pub fn parse(data: &[u8]) -> Result<Capacity, String> {
        if data.len() < 12 {
            return Err(format!("READ CAPACITY(16) returned {} bytes, 32 wanted", data.len()));
        }
        let last = be(data, 0, 8);
        let block_size = be(data, 8, 4) as u32;
        if !block_size.is_power_of_two() || !(512..=65536).contains(&block_size) {
            return Err(format!("READ CAPACITY(16) reports a block size of {block_size}"));
        }
        let blocks = last.checked_add(1).ok_or("READ CAPACITY(16) reports 2^64 blocks")?;
        let thin = data.get(14).is_some_and(|b| b & 0x80 != 0);
        blocks.checked_mul(u64::from(block_size)).ok_or("the LU has more than 2^64 bytes")?;
        Ok(Capacity { blocks, block_size, thin })
    }

    /// Size of the LU in bytes.
    pub fn bytes(&self) -> u64 {
        // Cannot overflow: `parse` checked the product.
        self.blocks * u64::from(self.block_size)
    }
}

/// LUNs of REPORT LUNS data in the order given; those this program cannot address are left out.
pub fn parse_luns(data: &[u8]) -> Vec<u16> {
    let listed = (be(data, 0, 4) / 8) as usize;
    let entries = data.get(8..).unwrap_or(&[]).chunks_exact(8).take(listed);
    entries.filter_map(parse_lun).collect()
}

fn parse_lun(entry: &[u8]) -> Option<u16> {
    let word = be(entry, 0, 2) as u16;
    let single_level = entry[2..].iter().all(|&b| b == 0);
    match word >> 14 {
        0 | 1 if single_level => Some(word & 0x3fff),
        _ => None,
    }
}

/// Page codes of VPD page 00.
pub fn parse_vpd_list(data: &[u8]) -> Vec<u8> {
    let listed = be(data, 2, 2) as usize;
    data.get(4..).unwrap_or(&[]).iter().copied().take(listed).collect()
}

/// The unit serial number of VPD page 80.
pub fn parse_serial(data: &[u8]) -> String {
    text(data, 4, be(data, 2, 2) as usize)
}

/// One designator of VPD page 83, SPC-4 7.8.6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Designator {
    /// 0 = the LU, 1 = the target port, 2 = the target device.
    pub association: u8,
    /// 1 = T10 vendor id, 3 = NAA, 4 = relative target port, 5 = port group, 8 = name string.
    pub kind: u8,
    /// Printable value.
    pub value: String,
}

/// The designators of VPD page 83; a cut-off one ends the list.
pub fn parse_designators(data: &[u8]) -> Vec<Designator> {
    let end = data.len().min(4 + be(data, 2, 2) as usize);
    let mut rest = data.get(4..end).unwrap_or(&[]);
    let mut out = Vec::new();
    while let Some((head, tail)) = rest.split_first_chunk::<4>() {
        let Some((id, next)) = tail.split_at_checked(usize::from(head[3])) else { break };
        let binary = head[0] & 0xf == 1;
        let value = if binary { hex(id) } else { text(id, 0, id.len()) };
        out.push(Designator { association: head[1] >> 4 & 3, kind: head[1] & 0xf, value });
        rest = next;
    }
    out
}

/// The NAA designator of the LU, as hexadecimal digits.
pub fn naa_of(designators: &[Designator]) -> Option<&str> {
    let found = designators.iter().find(|d| d.association == 0 && d.kind == 3);
    found.map(|d| d.value.as_str())
}

/// VPD page B0: the limits that shape our own I/O.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// Largest transfer in blocks; 0 = not reported.
    pub max_transfer_blocks: u32,
    /// Best transfer in blocks; 0 = not reported.
    pub optimal_transfer_blocks: u32,
    /// Largest UNMAP in blocks.
    pub max_unmap_blocks: u32,
    /// Largest WRITE SAME in blocks.
    pub max_write_same_blocks: u64,
    /// Largest COMPARE AND WRITE in blocks.
    pub max_compare_blocks: u8,
}

impl BlockLimits {
    /// Reads page B0; what did not arrive is 0.
    pub fn parse(data: &[u8]) -> BlockLimits {
        BlockLimits {
            max_transfer_blocks: be(data, 8, 4) as u32,
            optimal_transfer_blocks: be(data, 12, 4) as u32,
            max_unmap_blocks: be(data, 20, 4) as u32,
            max_write_same_blocks: be(data, 36, 8),
            max_compare_blocks: data.get(5).copied().unwrap_or(0),
        }
    }
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_write_takes_the_short_form_while_it_fits() {
        assert_eq!(read_write(false, 0x1000, 8)[..9], [0x28, 0, 0, 0, 0x10, 0, 0, 0, 8]);
        assert_eq!(read_write(true, 1 << 32, 1)[0], 0x8a);
        assert_eq!(read_write(true, 0, 65536)[0], 0x8a);
        let long = read_write(false, 0x0102_0304_0506_0708, 9);
        assert_eq!(long[2..14], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9]);
    }

    #[test]
    fn luns_are_written_and_read_in_both_addressing_methods() {
        for lun in [0u16, 1, 255, 256, 16383] {
            let mut data = vec![0, 0, 0, 8, 0, 0, 0, 0];
            data.extend(lun_field(lun));
            assert_eq!(parse_luns(&data), [lun]);
        }
        assert_eq!(lun_field(300)[..2], [0x41, 0x2c]);
    }

    #[test]
    fn report_luns_length_is_not_trusted() {
        let data = [0xff, 0xff, 0xff, 0xf8, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(parse_luns(&data), [3]);
        assert_eq!(parse_luns(&[]), [0u16; 0]);
        let well_known = [0, 0, 0, 8, 0, 0, 0, 0, 0xc1, 1, 0, 0, 0, 0, 0, 0];
        assert!(parse_luns(&well_known).is_empty());
    }

    #[test]
    fn capacity_refuses_what_cannot_be() {
        let mut data = [0u8; 32];
        data[7] = 99;
        data[8..12].copy_from_slice(&512u32.to_be_bytes());
        let want = Capacity { blocks: 100, block_size: 512, thin: false };
        assert_eq!(Capacity::parse(&data), Ok(want));
        data[11] = 1;
        assert!(Capacity::parse(&data).unwrap_err().contains("513"));
        data[11] = 0;
        data[..8].fill(0xff);
        assert!(Capacity::parse(&data).unwrap_err().contains("2^64"));
        assert!(Capacity::parse(&data[..8]).unwrap_err().contains("8 bytes"));
    }

    #[test]
    fn inquiry_and_vpd_pages_are_taken_apart() {
        let mut data = vec![0u8, 0, 6, 2, 31, 0, 0, 2];
        data.extend(b"USURP   malloc disk     0001");
        let inq = Inquiry::parse(&data).unwrap();
        assert_eq!((inq.vendor.as_str(), inq.product.as_str()), ("USURP", "malloc disk"));
        assert!(inq.is_connected());
        assert_eq!(Inquiry::parse(&data[..35]), None);

        let page = [0, 0x83, 0, 14, 1, 3, 0, 4, 0x60, 1, 2, 3, 2, 1, 0, 2, b'o', b'k'];
        let list = parse_designators(&page);
        assert_eq!(list.len(), 2);
        assert_eq!(naa_of(&list), Some("60010203"));
        assert_eq!(list[1].value, "ok");
        // A designator that runs over the end of the page is dropped.
        assert_eq!(parse_designators(&page[..17]).len(), 1);
        assert_eq!(parse_serial(&[0, 0x80, 0, 200, b'a', b'b']), "ab");
    }
}
