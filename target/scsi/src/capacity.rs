//! READ CAPACITY (10), (16) (SBC-3, commands of these names).
//!
//! Owns: how the geometry is told. Never does: GET LBA STATUS (9E/12), which needs a bdev that can
//! say what is mapped.
//!
//! Invariant: with PMI = 0 the LBA has to be 0 (both commands).

use crate::lu::{Call, Lu, respond};
use crate::sense::Sense;
use crate::step::{Step, data_in};

const PMI: u8 = 0x01;

pub(crate) fn read_capacity_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let pmi = call.cdb.byte(8) & PMI != 0;
    if !pmi && call.cdb.be32(2) != 0 {
        return call.task.check(Sense::cdb_field(2));
    }
    let last = u32::try_from(lu.geometry.blocks - 1).unwrap_or(u32::MAX);
    let reply = data_in(call.scratch, call.task.data_in_len, 8, |out| {
        out.push(&last.to_be_bytes());
        out.push(&lu.geometry.block_size.to_be_bytes());
    });
    respond(call.task, Ok(reply))
}

pub(crate) fn read_capacity_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let pmi = call.cdb.byte(14) & PMI != 0;
    if !pmi && call.cdb.be64(2) != 0 {
        return call.task.check(Sense::cdb_field(2));
    }
    let provisioning =
        u8::from(lu.caps.unmap) << 7 | u8::from(lu.caps.unmap && lu.caps.unmap_zeroes) << 6;
    let reply = data_in(call.scratch, call.task.data_in_len, call.cdb.be32(10), |out| {
        out.push(&(lu.geometry.blocks - 1).to_be_bytes());
        out.push(&lu.geometry.block_size.to_be_bytes());
        // No protection information; LOWEST ALIGNED LBA is 0.
        out.push(&[0, lu.geometry.physical_block_exp & 0x0F, provisioning, 0]);
        out.zeros(16);
    });
    respond(call.task, Ok(reply))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Reply;
    use crate::testing::{Bench, lu, plain};

    const TEN: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const SIXTEEN: [u8; 16] = [0x9E, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];

    #[test]
    fn ten_tells_last_block_and_block_size() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.data(&TEN, 8), [0, 0, 0x27, 0x0F, 0, 0, 2, 0]);
        let mut pmi = TEN;
        pmi[5] = 9;
        assert_eq!(bench.sense(&pmi, 0, 8), Sense::cdb_field(2));
        pmi[8] = 1;
        assert_eq!(bench.data(&pmi, 8).len(), 8);
    }

    #[test]
    fn ten_of_a_large_unit_says_to_ask_sixteen() {
        for (blocks, last) in [(1 << 32, 0xFFFF_FFFF_u32), ((1 << 32) - 1, 0xFFFF_FFFE)] {
            let mut bench = Bench::new(lu(|config| config.geometry.blocks = blocks));
            assert_eq!(bench.data(&TEN, 8)[..4], last.to_be_bytes());
        }
        let mut bench = Bench::new(lu(|config| config.geometry.blocks = 1 << 40));
        assert_eq!(bench.data(&TEN, 8)[..4], [0xFF; 4]);
    }

    #[test]
    fn sixteen_tells_alignment_and_provisioning() {
        let mut want = vec![0, 0, 0, 0, 0, 0, 0x27, 0x0F, 0, 0, 2, 0, 0, 3, 0, 0];
        want.resize(32, 0);
        assert_eq!(Bench::new(plain()).data(&SIXTEEN, 32), want);
        let mut thin = Bench::new(lu(|config| {
            config.caps.unmap = true;
            config.caps.unmap_zeroes = true;
        }));
        want[14] = 0xC0;
        assert_eq!(thin.data(&SIXTEEN, 32), want);
        let mut pmi = SIXTEEN;
        pmi[9] = 1;
        assert_eq!(thin.sense(&pmi, 0, 32), Sense::cdb_field(2));
    }

    #[test]
    fn residuals_come_from_allocation_and_buffer() {
        let mut bench = Bench::new(plain());
        let s_and_built = |reply: Reply| (reply.wants_in, reply.data_in_len);
        assert_eq!(s_and_built(bench.reply(&SIXTEEN, 0, 512)), (32, 32));
        assert_eq!(s_and_built(bench.reply(&SIXTEEN, 0, 12)), (32, 12));
        let mut short = SIXTEEN;
        short[13] = 12;
        assert_eq!(s_and_built(bench.reply(&short, 0, 512)), (12, 12));
        assert_eq!(s_and_built(bench.reply(&TEN, 0, 512)), (8, 8));
    }
}
