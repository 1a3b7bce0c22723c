//! `usurp-perf luns` and `usurp-perf inq`: what the target shows of its logical units, as text.

use std::fmt::Write as _;

use usurp_fabric::Fabric;

use crate::cdb;
use crate::client::Client;
use crate::error::Error;

/// The table of `luns`: one line per LUN that the target reports.
pub fn luns<F: Fabric>(client: &mut Client<F>) -> Result<String, Error> {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:>5} {:>10} {:>5}  {:8} {:16} {:20} NAA",
        "LUN", "SIZE", "BLOCK", "VENDOR", "PRODUCT", "SERIAL"
    );
    for lun in client.report_luns()? {
        match line(client, lun) {
            Ok(text) => out.push_str(&text),
            // One LU that cannot be asked must not hide the others.
            Err(error @ (Error::Scsi { .. } | Error::Protocol(_))) => {
                let _ = writeln!(out, "{lun:>5} {error}");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(out)
}

fn line<F: Fabric>(client: &mut Client<F>, lun: u16) -> Result<String, Error> {
    let inq = client.inquiry(lun)?;
    if !inq.is_connected() {
        return Ok(format!("{lun:>5} not connected (peripheral qualifier {})\n", inq.qualifier));
    }
    client.wait_ready(lun)?;
    let capacity = client.read_capacity16(lun)?;
    let serial = client.vpd(lun, 0x80)?.map(|page| cdb::parse_serial(&page));
    let designators = client.vpd(lun, 0x83)?.map(|page| cdb::parse_designators(&page));
    let naa = designators.as_deref().and_then(cdb::naa_of).unwrap_or("-");
    Ok(format!(
        "{lun:>5} {:>10} {:>5}  {:8} {:16} {:20} {naa}\n",
        human_size(capacity.bytes()),
        capacity.block_size,
        inq.vendor,
        inq.product,
        serial.as_deref().unwrap_or("-"),
    ))
}

/// Everything that `inq` shows of one LU.
pub fn inq<F: Fabric>(client: &mut Client<F>, lun: u16) -> Result<String, Error> {
    let inq = client.inquiry(lun)?;
    if inq.qualifier == 3 {
        return Err(Error::NoLun(lun));
    }
    let mut out = String::new();
    let _ = writeln!(out, "LUN {lun}");
    let _ = writeln!(out, "  vendor     {}", inq.vendor);
    let _ = writeln!(out, "  product    {}", inq.product);
    let _ = writeln!(out, "  revision   {}", inq.revision);
    let _ = writeln!(
        out,
        "  type       {:#04x}, qualifier {}, version {:#04x}",
        inq.device_type, inq.qualifier, inq.version
    );
    if !inq.is_connected() {
        return Ok(out);
    }
    let pages = client.vpd(lun, 0x00)?.map(|page| cdb::parse_vpd_list(&page)).unwrap_or_default();
    let codes: Vec<String> = pages.iter().map(|p| format!("{p:02x}")).collect();
    let _ = writeln!(out, "  VPD pages  {}", codes.join(" "));
    for page in pages.into_iter().filter(|&p| p != 0) {
        if let Some(data) = client.vpd(lun, page)? {
            vpd_text(page, &data, &mut out);
        }
    }
    client.wait_ready(lun)?;
    let capacity = client.read_capacity16(lun)?;
    let _ = writeln!(
        out,
        "  capacity   {} blocks of {} bytes, {}{}",
        capacity.blocks,
        capacity.block_size,
        human_size(capacity.bytes()),
        if capacity.thin { ", thin" } else { "" }
    );
    Ok(out)
}

/// One VPD page in words, or in hexadecimal digits when it is not known here.
fn vpd_text(page: u8, data: &[u8], out: &mut String) {
    let _ = match page {
        0x80 => writeln!(out, "  80 serial  {}", cdb::parse_serial(data)),
        0x83 => {
            for d in cdb::parse_designators(data) {
                let of = ["LU", "port", "device", "?"][usize::from(d.association & 3)];
                let kind = designator_kind(d.kind);
                let _ = writeln!(out, "  83 {of:6} {kind:20} {}", d.value);
            }
            Ok(())
        }
        0xb0 => {
            let l = cdb::BlockLimits::parse(data);
            writeln!(
                out,
                "  b0 limits  transfer {} (optimal {}), unmap {}, write same {}, compare {} blocks",
                l.max_transfer_blocks,
                l.optimal_transfer_blocks,
                l.max_unmap_blocks,
                l.max_write_same_blocks,
                l.max_compare_blocks
            )
        }
        0xb1 => writeln!(out, "  b1 medium  {}", rotation(data)),
        0xb2 => writeln!(out, "  b2 thin    {}", provisioning(data)),
        _ => writeln!(out, "  {page:02x}         {}", cdb::hex(data.get(4..).unwrap_or(&[]))),
    };
}

fn designator_kind(kind: u8) -> &'static str {
    match kind {
        1 => "T10 vendor id",
        2 => "EUI-64",
        3 => "NAA",
        4 => "relative target port",
        5 => "target port group",
        6 => "logical unit group",
        8 => "SCSI name",
        _ => "other",
    }
}

fn rotation(data: &[u8]) -> String {
    match data.get(4..6) {
        Some([0, 0]) | None => "rotation rate not reported".into(),
        Some([0, 1]) => "not rotating".into(),
        Some(rate) => format!("{} rpm", u16::from_be_bytes([rate[0], rate[1]])),
    }
}

fn provisioning(data: &[u8]) -> String {
    let flags = data.get(5).copied().unwrap_or(0);
    let names = [(0x80, "UNMAP"), (0x40, "WRITE SAME(16)"), (0x20, "WRITE SAME(10)")];
    let able: Vec<&str> = names.iter().filter(|(bit, _)| flags & bit != 0).map(|n| n.1).collect();
    let zeroes = if flags & 0x1c != 0 { ", unmapped blocks read as zeros" } else { "" };
    match able.is_empty() {
        true => format!("no unmap{zeroes}"),
        false => format!("unmap by {}{zeroes}", able.join(", ")),
    }
}

/// A size with a binary unit, exact when it is a round number.
pub fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match value.fract() == 0.0 {
        true => format!("{value:.0}{}", UNITS[unit]),
        false => format!("{value:.1}{}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        assert_eq!(human_size(0), "0B");
        assert_eq!(human_size(1 << 30), "1GiB");
        assert_eq!(human_size(3 << 19), "1.5MiB");
        assert_eq!(human_size(1 << 60), "1024PiB");
    }

    #[test]
    fn vpd_pages_cut_short_do_not_panic() {
        let mut out = String::new();
        for page in [0x80, 0x83, 0x86, 0xb0, 0xb1, 0xb2] {
            for len in 0..64 {
                vpd_text(page, &vec![0xff; len], &mut out);
            }
        }
        assert!(out.contains("65535 rpm"));
    }
}
