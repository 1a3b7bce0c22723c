//! MODE SENSE (6), (10) (SPC-4; pages: SPC-4 and SBC-3, mode parameters).
//!
//! Owns: the mode pages. Never does: change them: MODE SELECT comes with a later issue, so every
//! changeable mask is zero and WCE mirrors the bdev.
//!
//! ```text
//!   header 4 or 8: length, medium type 0, WP|DPOFUA, [LONGLBA,] descriptor length
//!   block descriptor 0, 8 or 16 (LLBAA)          pages, ascending
//! ```
//!
//! Invariant: PC chooses among the values of page bytes only; header and block descriptor are
//! always current (SPC-4 MODE SENSE, PC field).

use crate::lu::{Call, Lu, respond};
use crate::sense::Sense;
use crate::step::{Builder, Reply, Step, data_in};

const DBD: u8 = 0x08;
const LLBAA: u8 = 0x10;
const WP: u8 = 0x80;
const DPOFUA: u8 = 0x10;

const ALL_PAGES: u8 = 0x3F;
const ALL_SUBPAGES: u8 = 0xFF;

const PC_CHANGEABLE: u8 = 1;
const PC_SAVED: u8 = 3;

/// Page code, and what makes its current values after the two bytes of code and length.
type Page = (u8, fn(&Lu, &mut Builder<'_>));

/// The pages, ascending. 1C comes with its exceptions, 0A/01 with command priorities.
const PAGES: [Page; 3] = [(0x01, error_recovery), (0x08, caching), (0x0A, control)];

pub(crate) fn sense_6(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let result = sense(lu, call, u32::from(call.cdb.byte(4)), false);
    respond(call.task, result)
}

pub(crate) fn sense_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let result = sense(lu, call, u32::from(call.cdb.be16(7)), true);
    respond(call.task, result)
}

fn sense(lu: &Lu, call: &mut Call<'_>, allocation: u32, ten: bool) -> Result<Reply, Sense> {
    let (flags, control, code) = (call.cdb.byte(1), call.cdb.byte(2) >> 6, call.cdb.byte(2) & 0x3F);
    let pages = select(code, call.cdb.byte(3))?;
    if control == PC_SAVED {
        return Err(Sense::SAVING);
    }
    let descriptor = if flags & DBD != 0 {
        Descriptor::None
    } else if ten && flags & LLBAA != 0 {
        Descriptor::Long
    } else {
        Descriptor::Short
    };
    Ok(data_in(call.scratch, call.task.data_in_len, allocation, |out| {
        header(lu, out, ten, descriptor);
        for (code, values) in pages {
            page(lu, out, *code, *values, control == PC_CHANGEABLE);
        }
        if ten {
            let length = (out.len() - 2) as u16;
            out.set(0, &length.to_be_bytes());
        } else {
            let length = (out.len() - 1) as u8;
            out.set(0, &[length]);
        }
    }))
}

/// The pages asked for. None of ours has subpages, so "all subpages" is the page itself.
fn select(code: u8, subpage: u8) -> Result<&'static [Page], Sense> {
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::cdb_field(3));
    }
    if code == ALL_PAGES {
        return Ok(&PAGES);
    }
    let at = PAGES.iter().position(|page| page.0 == code);
    let at = at.ok_or(Sense::cdb_field(2).at_bit(5))?;
    Ok(&PAGES[at..=at])
}

/// Which block descriptor to send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Descriptor {
    None,
    Short,
    Long,
}

fn header(lu: &Lu, out: &mut Builder<'_>, ten: bool, descriptor: Descriptor) {
    let specific = if lu.read_only { WP | DPOFUA } else { DPOFUA };
    let length = match descriptor {
        Descriptor::None => 0,
        Descriptor::Short => 8,
        Descriptor::Long => 16,
    };
    if ten {
        let long = u8::from(descriptor == Descriptor::Long);
        out.push(&[0, 0, 0, specific, long, 0, 0, length]);
    } else {
        out.push(&[0, 0, specific, length]);
    }
    match descriptor {
        Descriptor::None => {}
        Descriptor::Short => {
            let blocks = u32::try_from(lu.geometry.blocks).unwrap_or(u32::MAX);
            out.push(&blocks.to_be_bytes());
            // Byte 4 is reserved, the length has three bytes.
            out.push(&lu.geometry.block_size.to_be_bytes());
        }
        Descriptor::Long => {
            out.push(&lu.geometry.blocks.to_be_bytes());
            out.zeros(4);
            out.push(&lu.geometry.block_size.to_be_bytes());
        }
    }
}

fn page(lu: &Lu, out: &mut Builder<'_>, code: u8, values: fn(&Lu, &mut Builder<'_>), mask: bool) {
    let start = out.len();
    out.push(&[code, 0]);
    values(lu, out);
    let length = out.len() - start - 2;
    out.set(start + 1, &[length as u8]);
    if mask {
        for at in 0..length {
            out.set(start + 2 + at, &[0]);
        }
    }
}

/// Read-Write Error Recovery: nothing to tune; bdevs recover by themselves or fail.
fn error_recovery(_lu: &Lu, out: &mut Builder<'_>) {
    out.zeros(10);
}

/// Caching: WCE says whether there is a volatile cache.
fn caching(lu: &Lu, out: &mut Builder<'_>) {
    out.push(&[u8::from(lu.caps.flush) << 2]);
    out.zeros(17);
}

/// Control: one task set for all nexuses (TST 0), unrestricted reordering (QAM 1), QERR 0, TAS 0.
fn control(lu: &Lu, out: &mut Builder<'_>) {
    out.push(&[u8::from(lu.d_sense) << 2, 0x10]);
    out.zeros(8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, lu, plain};

    const RECOVERY: [u8; 12] = [0x01, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const CACHING: [u8; 20] = [0x08, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const CONTROL: [u8; 12] = [0x0A, 10, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn six_has_a_short_header_and_the_block_descriptor() {
        let data = Bench::new(plain()).data(&[0x1A, 0, 0x08, 0, 255, 0], 255);
        let mut want = vec![31, 0, 0x10, 8, 0, 0, 0x27, 0x10, 0, 0, 2, 0];
        want.extend(CACHING);
        assert_eq!(data, want);
    }

    #[test]
    fn dbd_leaves_the_descriptor_out_and_3f_gives_all_pages() {
        for subpage in [0x00, 0xFF] {
            let data = Bench::new(plain()).data(&[0x1A, 0x08, 0x3F, subpage, 255, 0], 255);
            let mut want = vec![47, 0, 0x10, 0];
            want.extend(RECOVERY);
            want.extend(CACHING);
            want.extend(CONTROL);
            assert_eq!(data, want);
        }
    }

    #[test]
    fn ten_has_long_descriptors_only_with_llbaa() {
        let mut bench = Bench::new(lu(|config| config.geometry.blocks = 0x2_0000_0003));
        let data = bench.data(&[0x5A, 0x10, 0x0A, 0, 0, 0, 0, 0, 255, 0], 255);
        let mut want = vec![0, 34, 0, 0x10, 1, 0, 0, 16];
        want.extend([0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 2, 0]);
        want.extend(CONTROL);
        assert_eq!(data, want);

        let data = bench.data(&[0x5A, 0x00, 0x0A, 0, 0, 0, 0, 0, 255, 0], 255);
        let mut want = vec![0, 26, 0, 0x10, 0, 0, 0, 8, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 2, 0];
        want.extend(CONTROL);
        assert_eq!(data, want);
    }

    #[test]
    fn write_protection_and_the_lack_of_a_cache_show() {
        let mut bench = Bench::new(lu(|config| {
            config.read_only = true;
            config.caps.flush = false;
        }));
        let data = bench.data(&[0x1A, 8, 0x08, 0, 255, 0], 255);
        assert_eq!(data[..7], [23, 0, 0x90, 0, 0x08, 18, 0]);
    }

    #[test]
    fn page_control_chooses_values_and_saved_ones_do_not_exist() {
        let mut bench = Bench::new(plain());
        let changeable = bench.data(&[0x1A, 8, 0x48, 0, 255, 0], 255);
        assert_eq!(changeable[4..6], [0x08, 18]);
        assert!(changeable[6..].iter().all(|byte| *byte == 0));
        let default = bench.data(&[0x1A, 8, 0x88, 0, 255, 0], 255);
        assert_eq!(default[4..], CACHING);
        assert_eq!(bench.sense(&[0x1A, 8, 0xC8, 0, 255, 0], 0, 255), Sense::SAVING);
    }

    #[test]
    fn unknown_pages_subpages_and_llbaa_in_six_are_refused() {
        let mut bench = Bench::new(plain());
        let page = bench.sense(&[0x1A, 0, 0x1C, 0, 255, 0], 0, 255);
        assert_eq!(page, Sense::cdb_field(2).at_bit(5));
        assert_eq!(bench.sense(&[0x1A, 0, 0x0A, 1, 255, 0], 0, 255), Sense::cdb_field(3));
        assert_eq!(bench.sense(&[0x1A, 0, 0x3F, 1, 255, 0], 0, 255), Sense::cdb_field(3));
        let llbaa = bench.sense(&[0x1A, 0x10, 0x0A, 0, 255, 0], 0, 255);
        assert_eq!(llbaa, Sense::cdb_field(1).at_bit(4));
    }

    #[test]
    fn a_short_allocation_still_tells_the_full_length() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.data(&[0x1A, 0, 0x3F, 0, 4, 0], 100), [55, 0, 0x10, 8]);
        assert_eq!(bench.data(&[0x5A, 0, 0x3F, 0, 0, 0, 0, 0, 2, 0], 100), [0, 58]);
    }
}
