//! The residual of one direction of a command (reference 4.9; SRP r16a 6.9, SAM residual count).

/// How the length a CDB transfers (S) differs from the initiator's buffer (D).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// S = D.
    #[default]
    None,
    /// S > D by this many bytes: the buffer was too small.
    Over(u32),
    /// S < D by this many bytes: the rest of the buffer was not touched.
    Under(u32),
}

impl Residual {
    /// Compares what the device server would move with what the buffer holds. Counts beyond 32 bits
    /// are clamped.
    #[inline]
    pub fn of(scsi_len: u64, buffer_len: u64) -> Residual {
        let clamp = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        match scsi_len.cmp(&buffer_len) {
            core::cmp::Ordering::Equal => Residual::None,
            core::cmp::Ordering::Greater => Residual::Over(clamp(scsi_len - buffer_len)),
            core::cmp::Ordering::Less => Residual::Under(clamp(buffer_len - scsi_len)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residual_follows_the_table_of_4_9() {
        assert_eq!(Residual::of(512, 512), Residual::None);
        assert_eq!(Residual::of(96, 1024), Residual::Under(928));
        assert_eq!(Residual::of(1024, 96), Residual::Over(928));
        assert_eq!(Residual::of(0, 0), Residual::None);
        assert_eq!(Residual::of(u64::MAX, 1), Residual::Over(u32::MAX));
    }
}
