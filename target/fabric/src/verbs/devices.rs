//! RDMA devices of this machine, for `usurp doctor`: names, GUIDs, and the GIDs of usable ports.
//!
//! Uses the safe layer of the `ibverbs` crate only, and knows its traps: opening a device fails
//! unless its port 1 is active, which here is something to report, not an error.

use std::io;

/// One GID of a port.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct GidInfo {
    /// Port, from 1.
    pub port: u32,
    /// Index in the port's table.
    pub index: u32,
    /// The 16 bytes as `fe80:0000:0000:0000:5054:00ff:fe4a:0b7b`.
    pub gid: String,
    /// "IB", "RoCE v1" or "RoCE v2".
    pub kind: &'static str,
    /// Interface index of the network device behind it; 0 = none.
    pub ifindex: u32,
}

/// What could be learnt about a device's ports.
#[derive(Clone, Eq, PartialEq, Debug)]
pub enum PortInfo {
    /// The device opened: port 1 is active.
    Active {
        /// Its GIDs.
        gids: Vec<GidInfo>,
    },
    /// The device did not open; why. Mostly: port 1 is down.
    Unusable(String),
}

/// One RDMA device.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct DeviceInfo {
    /// Kernel name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// Node GUID, if the device has one.
    pub guid: Option<u64>,
    /// Its ports.
    pub ports: PortInfo,
}

/// Why devices could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// The kernel has no RDMA support loaded.
    #[error("the kernel offers no RDMA user access (load ib_uverbs, or a driver such as rdma_rxe)")]
    NoKernelSupport,
    /// Another failure.
    #[error("listing RDMA devices: {0}")]
    List(#[source] io::Error),
}

/// Lists all RDMA devices; empty when there are none.
pub fn devices() -> Result<Vec<DeviceInfo>, VerbsError> {
    let list = ibverbs::devices().map_err(|e| match e.kind() {
        io::ErrorKind::Unsupported => VerbsError::NoKernelSupport,
        _ if e.raw_os_error() == Some(libc::ENOSYS) => VerbsError::NoKernelSupport,
        _ => VerbsError::List(e),
    })?;
    Ok(list.iter().map(|device| describe(&device)).collect())
}

fn describe(device: &ibverbs::Device<'_>) -> DeviceInfo {
    let name = device.name().map(|n| n.to_string_lossy().into_owned());
    let ports = match device.open() {
        Ok(context) => PortInfo::Active { gids: gids(&context) },
        Err(e) => PortInfo::Unusable(e.to_string()),
    };
    DeviceInfo {
        name: name.unwrap_or_else(|| "unnamed".to_owned()),
        guid: device.guid().ok().map(u64::from),
        ports,
    }
}

fn gids(context: &ibverbs::Context) -> Vec<GidInfo> {
    let info = |entry: &ibverbs::GidEntry| GidInfo {
        port: entry.port_num,
        index: entry.gid_index,
        gid: text(entry.gid.subnet_prefix(), entry.gid.interface_id()),
        kind: match entry.gid_type {
            0 => "IB",
            1 => "RoCE v1",
            2 => "RoCE v2",
            _ => "unknown",
        },
        ifindex: entry.ndev_ifindex,
    };
    context.gid_table().iter().map(info).collect()
}

/// A GID in groups of four digits.
fn text(prefix: u64, interface: u64) -> String {
    let all = u128::from(prefix) << 64 | u128::from(interface);
    let groups: Vec<String> =
        (0..8).rev().map(|i| format!("{:04x}", (all >> (16 * i)) & 0xffff)).collect();
    groups.join(":")
}

#[cfg(test)]
mod tests {
    #[test]
    fn gids_read_as_usual() {
        let text = super::text(0xfe80 << 48, 0x5054_00ff_fe4a_0b7b);
        assert_eq!(text, "fe80:0000:0000:0000:5054:00ff:fe4a:0b7b");
    }

    #[test]
    fn listing_never_panics() {
        match super::devices() {
            Ok(devices) => devices.iter().for_each(|d| println!("{d:?}")),
            Err(e) => println!("{e}"),
        }
    }
}
