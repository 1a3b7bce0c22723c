//! Logging in: from an address to a [`Client`] with its channels.
//!
//! ```text
//!   data arena --Regions--> rkey      channel 0: SRP_LOGIN_REQ, MULTI-CHANNEL ACTION = SINGLE
//!                                     channel n: the same ids, MULTI-CHANNEL ACTION = MULTI
//!   each answer: SRP_LOGIN_RSP -> Client::add_channel | SRP_LOGIN_REJ -> Error::Rejected
//! ```
//! SINGLE ends whatever channels a nexus of the same two ids still has; so the GUID of our port is
//! random unless it is given, and two programs at a time do not cut each other off.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::time::Duration;

use usurp_fabric::LoginFormat;
use usurp_fabric::shm::{self, ConnectError, ConnectParams, FabricConfig, QpConfig, ShmFabric};
use usurp_srp::PortId;
use usurp_srp::initiator::{
    Format, LoginError, MultiChannel, linux_login, login_answer, login_req as login_iu,
};
use usurp_srp::wire::login_req::{self, FLAG_IMMED};

use crate::args::{Address, DescFormat, LinkArgs};
use crate::client::{Client, DataArea, Shape};
use crate::error::{Error, reject_words};

/// A client over shared memory.
pub type ShmClient = Client<ShmFabric>;

/// Offset of immediate data in an IU, as Linux has it: behind 48 bytes, a 32-byte CDB's rest, and
/// the descriptor.
pub const IMM_OFFSET: u32 = 68;
/// Most immediate data of a command, as Linux has it.
pub const IMM_BYTES_MAX: u32 = 8192;
/// Largest IU without immediate data: 12 descriptors, as Linux has it.
const IT_IU_LEN: u32 = 276;
/// Receives for what the target sends unasked: requests of its own, and answers to TMFs.
pub const RECV_SPARE: u32 = 4;
/// Receives that are posted at a time.
pub const RECV_BATCH: u32 = 32;
/// Fewest receives of a channel.
pub const RECV_MIN: u32 = 64;
/// Sends that may wait for a signalled completion, over and above one per slot.
const SEND_SPARE: u32 = 128;
/// Longest wait for an answer to a login.
const LOGIN_S_MAX: u64 = 10;

/// Who logs in to whom.
#[derive(Copy, Clone, Debug)]
pub struct Nexus {
    /// Our port.
    pub initiator: PortId,
    /// The target's.
    pub target: PortId,
}

impl Nexus {
    /// From the options.
    pub fn new(link: &LinkArgs) -> Nexus {
        let guid = link.initiator_guid.map_or_else(random_u64, |hex| hex.0);
        Nexus {
            initiator: PortId::from_halves(link.initiator_ext.0, guid),
            target: PortId::from_halves(link.id_ext.0, link.ioc_guid.0),
        }
    }
}

/// A number that is different in every process and call.
pub fn random_u64() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// Largest IU that this shape sends; what the login asks for.
pub fn it_iu_len(desc: DescFormat) -> u32 {
    match desc {
        DescFormat::Imm => IMM_OFFSET + IMM_BYTES_MAX,
        DescFormat::Direct | DescFormat::Indirect | DescFormat::Partial => IT_IU_LEN,
    }
}

/// Receives of a channel: one per command, the spare ones, and a batch that waits to be posted.
pub fn recv_count(slots: u32) -> u32 {
    (slots + RECV_SPARE + RECV_BATCH).max(RECV_MIN)
}

/// SRP_LOGIN_REQ of one channel: as Linux sends it, but immediate data only if `desc` asks for it.
pub fn login_request(nexus: &Nexus, desc: DescFormat, first: bool) -> login_req::Repr {
    let action = if first { MultiChannel::Single } else { MultiChannel::Multi };
    let mut request = linux_login(nexus.initiator, nexus.target, action);
    request.req_it_iu_len = it_iu_len(desc);
    if desc != DescFormat::Imm {
        request.req_flags &= !FLAG_IMMED;
        request.imm_data_offset = 0;
    }
    request
}

/// Connects as the options say.
pub fn open(
    address: &Address,
    link: &LinkArgs,
    shape: Shape,
    channels: usize,
) -> Result<ShmClient, Error> {
    let Address::Shm(path) = address;
    open_shm(path, &Nexus::new(link), shape, channels)
}

/// Connects `channels` channels to the target that listens at `path`.
pub fn open_shm(
    path: &Path,
    nexus: &Nexus,
    shape: Shape,
    channels: usize,
) -> Result<ShmClient, Error> {
    assert!(channels > 0, "a client without channels");
    let arena = DataArea::arena(&shape, channels)?;
    let mut regions = shm::Regions::new();
    let rkey = regions.add(&arena);
    let fabric = ShmFabric::new(FabricConfig { max_qps: channels });
    let mut client = Client::new(fabric, shape, DataArea { arena, rkey }, channels)?;
    let seconds = (shape.timeout_ns / 1_000_000_000).clamp(1, LOGIN_S_MAX);
    let qp =
        QpConfig { max_send_wr: shape.slots + SEND_SPARE, max_recv_wr: recv_count(shape.slots) };
    for at in 0..channels {
        let request = login_request(nexus, shape.desc, at == 0);
        let timeout = Duration::from_secs(seconds);
        let params = ConnectParams { timeout, qp, format: LoginFormat::IbCm64 };
        let connected = shm::connect(path, &login_iu(Format::IbCm64, &request), &regions, params);
        let connected = connected.map_err(|why| connect_error(path, at, &request, why))?;
        let granted = login_answer(&connected.rsp_private_data, &request);
        let granted = granted.map_err(|why| login_error(path, at, why))?;
        client.add_channel(connected.endpoint, &granted)?;
    }
    Ok(client)
}

fn connect_error(path: &Path, at: usize, request: &login_req::Repr, why: ConnectError) -> Error {
    match why {
        ConnectError::Rejected(data) => match login_answer(&data, request) {
            Err(why) => login_error(path, at, why),
            Ok(_) => login_error(path, at, LoginError::Unusable("it rejects with an acceptance")),
        },
        why => Error::Connect { address: name(path), why: why.to_string() },
    }
}

fn login_error(path: &Path, channel: usize, why: LoginError) -> Error {
    let address = name(path);
    match why {
        LoginError::Rejected { code: reason, .. } => {
            Error::Rejected { address, channel, reason, words: reject_words(reason) }
        }
        why => Error::Connect { address, why: why.to_string() },
    }
}

fn name(path: &Path) -> String {
    format!("shm:{}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use usurp_srp::wire::login_rej;

    fn nexus() -> Nexus {
        Nexus { initiator: PortId::from_halves(1, 2), target: PortId::from_halves(3, 4) }
    }

    #[test]
    fn the_first_channel_asks_for_single_the_others_for_multi() {
        let flags = |first| login_request(&nexus(), DescFormat::Direct, first).req_flags;
        assert_eq!((flags(true), flags(false)), (0, 1));
        let request = login_request(&nexus(), DescFormat::Direct, true);
        assert_eq!((request.i_port_id, request.t_port_id), (nexus().initiator, nexus().target));
    }

    #[test]
    fn immediate_data_is_asked_for_only_when_wanted() {
        let req = login_request(&nexus(), DescFormat::Imm, true);
        assert_eq!((req.req_flags, req.imm_data_offset, req.req_it_iu_len), (0x80, 68, 8260));
        let req = login_request(&nexus(), DescFormat::Partial, true);
        assert_eq!((req.imm_data_offset, req.req_it_iu_len), (0, 276));
    }

    #[test]
    fn nobody_listening_is_a_connect_error_in_words() {
        let shape =
            Shape { slots: 2, buffer_bytes: 4096, desc: DescFormat::Direct, timeout_ns: 1 << 30 };
        let dir = tempfile::tempdir().unwrap();
        let Err(error) = open_shm(&dir.path().join("none"), &nexus(), shape, 1) else {
            panic!("connected to nobody");
        };
        assert_eq!(error.exit_code(), crate::error::EXIT_CONNECT);
        assert!(error.to_string().contains("nobody"), "{error}");
    }

    #[test]
    fn a_reject_is_reported_with_its_reason_in_words() {
        let mut data = [0; login_rej::LEN];
        let tag = usurp_srp::Tag::default();
        login_rej::Repr { reason: 0x0001_0003, tag, buf_fmt: 6 }.emit(&mut data);
        let request = login_request(&nexus(), DescFormat::Direct, true);
        let reject = |data: &[u8]| {
            connect_error(Path::new("/s"), 1, &request, ConnectError::Rejected(data.to_vec()))
        };
        let error = reject(&data);
        let text = error.to_string();
        assert!(text.contains("channel 1") && text.contains("not allowed in"), "{text}");
        assert!(reject(&[0xc2, 2]).to_string().contains("no login answer"));
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random_u64(), random_u64());
    }
}
