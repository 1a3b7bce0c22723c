//! What an initiator types to log in: the banner's lines, and `usurp login-info`.
//!
//! User space cannot set the bit by which an InfiniBand port is found to have targets
//! (IsDeviceManagementSupported), so srp_daemon discovers none here, and RoCE and iWARP have no
//! discovery at all: a Linux initiator is given this string for its `add_target` file.

use std::fmt::Write as _;
use std::net::SocketAddr;

use usurp_fabric::FabricError;
use usurp_fabric::any;

use crate::config::{Config, Listen, Target};

/// The identifiers that every login names.
fn ids(target: &Target) -> String {
    format!("id_ext={:016x},ioc_guid={:016x}", target.id_ext, target.ioc_guid)
}

/// The string for Linux's `add_target`, by RDMA/CM.
pub(crate) fn add_target(target: &Target, dest: SocketAddr) -> String {
    format!("{},dest={dest}", ids(target))
}

/// The banner's lines for one listener; `found` are the addresses of RDMA ports that it reaches.
pub(crate) fn listener_lines(
    target: &Target,
    listen: &Listen,
    found: &[(SocketAddr, String)],
) -> String {
    let mut text = String::new();
    let mut line = |s: String| {
        text.push_str(&s);
        text.push('\n');
    };
    match listen {
        Listen::Shm(path) => {
            let path = path.display();
            line(format!("  listens  shm:{path} ({})", ids(target)));
            line(format!(
                "  try      usurp-perf --connect shm:{path} --id-ext {:016x} \
                 --ioc-guid {:016x} luns",
                target.id_ext, target.ioc_guid
            ));
        }
        Listen::RdmaCm(addr) => {
            line(format!("  listens  rdma_cm:{addr}"));
            if found.is_empty() {
                line("           no RDMA port has an address yet".to_owned());
            }
            for (addr, device) in found {
                let login = add_target(target, *addr);
                line(format!(
                    "  try      echo {login} > \
                     /sys/class/infiniband_srp/srp-DEVICE-PORT/add_target  ({device} here)"
                ));
            }
        }
    }
    text
}

/// One `add_target` string a line for each RDMA port that the configuration's listeners reach; a
/// line that begins with `#` says which. `ports` answers for an address to listen at.
///
/// # Errors
/// None of the listeners is by RDMA, or none reaches a port: why, and what to do.
pub(crate) fn report(
    config: &Config,
    ports: impl Fn(SocketAddr) -> Result<Vec<(SocketAddr, String)>, FabricError>,
) -> Result<String, String> {
    let mut text = String::new();
    let mut strings = 0;
    let mut listeners = 0;
    for listen in &config.target.listen {
        let Listen::RdmaCm(at) = listen else { continue };
        listeners += 1;
        let found = ports(*at).map_err(|e| e.to_string())?;
        if found.is_empty() {
            let _ = writeln!(text, "# rdma_cm {at}: no RDMA port has this address");
        }
        for (addr, device) in found {
            strings += 1;
            let login = add_target(&config.target, addr);
            let _ = write!(text, "# rdma_cm {at} by {device}\n{login}\n");
        }
    }
    match (listeners, strings) {
        (0, _) => Err("no listener is by RDMA: `add_target` needs one such as \
                       `- { rdma_cm: \"[::]:5555\" }` in target.listen"
            .to_owned()),
        (_, 0) => Err(format!(
            "{text}none of the listeners reaches an RDMA port: `rdma link` shows the ports, \
             `usurp doctor` what is missing"
        )),
        _ => Ok(text),
    }
}

/// The report of this machine.
pub(crate) fn of_this_machine(config: &Config) -> Result<String, String> {
    report(config, any::rdma_addresses_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = r#"
bdevs: [ { name: n, null: { size: 1GiB } } ]
target:
  id_ext: "0x0002c903000e8acd"
  ioc_guid: "0x0002c903000e8acc"
  listen: [ LISTEN ]
  hosts: [ { initiator: any, luns: { 0: n } } ]
"#;

    fn config(listen: &str) -> Config {
        Config::parse("t.yaml", &YAML.replace("LISTEN", listen)).unwrap()
    }

    const WILD: &str = r#"{ rdma_cm: "[::]:5555" }, { shm: /run/u.sock }"#;

    #[test]
    fn each_port_has_its_string_and_ipv6_its_brackets() {
        let ports = |at: SocketAddr| {
            assert_eq!(at.to_string(), "[::]:5555");
            let port = |a: &str, d: &str| (a.parse().unwrap(), d.to_owned());
            Ok(vec![port("192.0.2.1:5555", "rxe0"), port("[2001:db8::1]:5555", "mlx5_0")])
        };
        let ids = "id_ext=0002c903000e8acd,ioc_guid=0002c903000e8acc";
        assert_eq!(
            report(&config(WILD), ports).unwrap(),
            format!(
                "# rdma_cm [::]:5555 by rxe0\n{ids},dest=192.0.2.1:5555\n\
                 # rdma_cm [::]:5555 by mlx5_0\n{ids},dest=[2001:db8::1]:5555\n"
            )
        );
    }

    #[test]
    fn without_a_port_or_a_listener_it_says_what_to_do() {
        let none = report(&config(WILD), |_| Ok(Vec::new())).unwrap_err();
        assert!(none.contains("# rdma_cm [::]:5555: no RDMA port"), "{none}");
        assert!(none.contains("`rdma link`"), "{none}");
        let shm = report(&config("{ shm: /run/u.sock }"), |_| panic!("not asked")).unwrap_err();
        assert!(shm.contains("rdma_cm: \"[::]:5555\""), "{shm}");
        let broken = |_| Err(FabricError::Invalid("modprobe rdma_ucm".to_owned()));
        assert_eq!(report(&config(WILD), broken).unwrap_err(), "modprobe rdma_ucm");
    }
}
