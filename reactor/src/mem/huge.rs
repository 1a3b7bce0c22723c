//! What the kernel says about its huge pages (`/proc/meminfo`), and the sentence that tells an
//! administrator what is lacking. Owns nothing; read at start-up only.

/// Huge pages of the default size, as the kernel counts them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HugePages {
    /// Bytes in one page; 0 when the kernel has no huge pages at all.
    pub page: usize,
    /// Pages in the pool (`nr_hugepages`).
    pub total: usize,
    /// Pages that can be had now: free less those promised to other mappings.
    pub free: usize,
}

/// Reads `/proc/meminfo`. An unreadable file counts as "no huge pages".
pub fn huge_pages() -> HugePages {
    parse(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse(meminfo: &str) -> HugePages {
    let value = |key: &str| -> usize {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
        let word = line.and_then(|rest| rest.split_whitespace().next());
        word.and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    let free = value("HugePages_Free:").saturating_sub(value("HugePages_Rsvd:"));
    HugePages { page: value("Hugepagesize:") * 1024, total: value("HugePages_Total:"), free }
}

impl HugePages {
    /// Pages needed for `bytes`; 0 when there is no huge page size.
    pub fn needed(&self, bytes: usize) -> usize {
        if self.page == 0 { 0 } else { bytes.div_ceil(self.page) }
    }

    /// What is missing for `bytes`, and the command that mends it.
    pub fn lack(&self, bytes: usize) -> String {
        if self.page == 0 {
            return "this kernel has no huge pages".to_string();
        }
        let (needed, kib) = (self.needed(bytes), self.page / 1024);
        let want = self.total + needed.saturating_sub(self.free);
        format!(
            "{needed} huge pages of {kib} KiB needed, {} free; \
             to mend it: echo {want} > /proc/sys/vm/nr_hugepages",
            self.free
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "MemFree: 1 kB\nHugePages_Total:     10\nHugePages_Free:       8\n\
                        HugePages_Rsvd:        3\nHugepagesize:       2048 kB\n";

    #[test]
    fn meminfo_is_read_and_reserved_pages_do_not_count_as_free() {
        assert_eq!(parse(TEXT), HugePages { page: 2 << 20, total: 10, free: 5 });
        assert_eq!(parse(""), HugePages { page: 0, total: 0, free: 0 });
    }

    #[test]
    fn the_lack_is_said_with_the_command_that_mends_it() {
        let text = parse(TEXT).lack(16 << 20);
        assert!(text.contains("8 huge pages of 2048 KiB needed, 5 free"), "{text}");
        assert!(text.contains("echo 13 > /proc/sys/vm/nr_hugepages"), "{text}");
        assert!(parse("").lack(1).contains("no huge pages"));
    }
}
