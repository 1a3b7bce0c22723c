//! A host that means harm, or is broken: logins that make no sense, IUs that were changed on their
//! way, keys and addresses out of thin air, requests without credit, connections cut at any moment.
//!
//! It has a logical unit of its own, so that what it does there does not matter. What matters is
//! that the target lives, that others are served, and that everything comes back in the end.

use usurp_fabric::LoginFormat;
use usurp_reactor::Nanos;
use usurp_srp::PortId;
use usurp_srp::initiator::{Format, MultiChannel, linux_login, login_req};

use crate::net::{Access, HostMemory, InitEvent, Net};
use crate::rng::Rng;

/// Bytes of its memory.
const MEMORY: usize = 64 << 10;

/// See the module's header.
pub struct Hostile {
    index: usize,
    port: PortId,
    target: PortId,
    rng: Rng,
    link: Option<usize>,
    up: bool,
    /// A key that is good.
    key: u32,
    /// Credit, roughly.
    credit: i64,
    /// IUs still to be sent.
    left: u32,
    next_at: Nanos,
    closing: bool,
    tag: u64,
}

impl Hostile {
    /// A hostile host and its memory.
    pub fn new(
        index: usize,
        port: PortId,
        target: PortId,
        count: u32,
        rng: Rng,
    ) -> (Hostile, HostMemory) {
        let memory = HostMemory::new(index, MEMORY, false);
        let host = Hostile {
            index,
            port,
            target,
            rng,
            link: None,
            up: false,
            key: 0,
            credit: 0,
            left: count,
            next_at: 0,
            closing: false,
            tag: 0,
        };
        (host, memory)
    }

    /// It has done its worst.
    pub fn is_idle(&self) -> bool {
        self.left == 0 || self.closing
    }

    /// No more.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// When it acts next.
    pub fn next_timer(&self) -> Nanos {
        if self.is_idle() { Nanos::MAX } else { self.next_at }
    }

    /// Does something. How much.
    pub fn turn(&mut self, net: &mut Net) -> usize {
        let mut events = self.listen(net);
        if self.is_idle() || net.now < self.next_at {
            return events;
        }
        self.next_at = net.now + self.rng.range(500, 20_000);
        events += 1;
        match self.link {
            None => self.connect(net),
            Some(link) if self.up => {
                self.left -= 1;
                if self.rng.chance(5_000) {
                    self.cut(link, net);
                } else {
                    let iu = self.iu(net);
                    net.init_send(link, &iu);
                }
            }
            Some(link) => {
                if self.rng.chance(20_000) {
                    self.cut(link, net);
                }
            }
        }
        events
    }

    fn cut(&mut self, link: usize, net: &mut Net) {
        if self.rng.chance(500_000) {
            net.init_disconnect(link);
        } else {
            net.vanish(link, Some(500_000));
        }
        self.link = None;
        self.up = false;
    }

    /// Takes whatever comes.
    fn listen(&mut self, net: &mut Net) -> usize {
        let Some(link) = self.link else { return 0 };
        let mut events = 0;
        while let Some(iu) = net.init_recv(link) {
            net.init_post_recv(link);
            let delta = iu.get(4..8).map_or(0, |b| i32::from_be_bytes([b[0], b[1], b[2], b[3]]));
            self.credit += i64::from(delta);
            if iu[0] == 0x81 && self.rng.chance(800_000) {
                let mut answer = [0; 16];
                answer[0] = 0x41;
                answer[8..16].copy_from_slice(&iu[8..16]);
                net.init_send(link, &answer);
            }
            events += 1;
        }
        match net.init_event(link) {
            Some(InitEvent::Accepted(answer)) => {
                self.up = true;
                self.credit = i64::from(answer[7]);
                self.key = net.memory[self.index].register(0, MEMORY, Access::Write, link, 0);
                if self.rng.chance(950_000) {
                    net.init_ready(link);
                }
                events + 1
            }
            Some(_) => {
                self.up = false;
                self.link = None;
                events + 1
            }
            None => events,
        }
    }

    fn connect(&mut self, net: &mut Net) {
        let single = self.rng.chance(500_000);
        let action = if single { MultiChannel::Single } else { MultiChannel::Multi };
        let mut req = linux_login(self.port, self.target, action);
        req.req_it_iu_len = self.rng.pick(&[64, 256, 512, 512, 512, 8260, u32::MAX, 0]);
        req.imm_data_offset = self.rng.pick(&[68, 68, 68, 0, 52, 400, 65535]);
        let mut private_data = login_req(Format::IbCm64, &req).to_vec();
        if self.rng.chance(100_000) {
            self.mutate(&mut private_data);
        }
        self.left -= 1;
        self.link = Some(net.connect(self.index, LoginFormat::IbCm64, private_data));
        self.up = false;
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.rng.range(1, 4) {
            match self.rng.below(4) {
                0 if !bytes.is_empty() => {
                    let at = self.rng.index(bytes.len());
                    bytes[at] = self.rng.bits() as u8;
                }
                1 if !bytes.is_empty() => {
                    let at = self.rng.index(bytes.len());
                    bytes[at] ^= 1 << self.rng.below(8);
                }
                2 => bytes.truncate(self.rng.index(bytes.len() + 1)),
                _ => {
                    let more = self.rng.index(40);
                    bytes.extend((0..more).map(|_| self.rng.bits() as u8));
                }
            }
        }
    }

    /// An IU that is nearly right.
    fn iu(&mut self, net: &mut Net) -> Vec<u8> {
        self.tag += u64::from(self.rng.chance(950_000));
        let mut iu = match self.rng.below(20) {
            0 => self.tsk_mgmt(),
            1 => (0..self.rng.range(1, 80)).map(|_| self.rng.bits() as u8).collect(),
            2 => vec![self.rng.pick(&[0x00, 0x41, 0x42, 0x80, 0xC1, 0x7F]); 16],
            _ => self.command(net),
        };
        if self.rng.chance(300_000) {
            self.mutate(&mut iu);
        }
        if self.rng.chance(2_000) {
            iu = vec![3; 16];
        }
        let costs = iu.first().is_some_and(|op| op & 0x40 == 0);
        if costs && self.credit <= 1 && self.rng.chance(990_000) {
            // Mostly it keeps to its credit, or it would be cut off every time.
            iu = vec![0x42; 16];
        } else if costs {
            self.credit -= 1;
        }
        iu
    }

    fn tsk_mgmt(&mut self) -> Vec<u8> {
        let mut iu = vec![0; 48];
        iu[0] = 0x01;
        iu[8..16].copy_from_slice(&self.tag.to_le_bytes());
        iu[30] = self.rng.pick(&[1, 1, 2, 4, 8, 0x20, 0x40, 0xFF]);
        let task = self.tag.saturating_sub(self.rng.below(6));
        iu[32..40].copy_from_slice(&task.to_le_bytes());
        iu
    }

    fn command(&mut self, net: &mut Net) -> Vec<u8> {
        let mut iu = vec![0; 48];
        iu[0] = 0x02;
        iu[8..16].copy_from_slice(&self.tag.to_le_bytes());
        iu[20..22].copy_from_slice(&self.rng.pick(&[0u16, 0, 0, 1, 0xC101, 0x4001]).to_be_bytes());
        let opcodes =
            [0x28, 0x2A, 0x88, 0x8A, 0x12, 0xA0, 0x42, 0x93, 0x8F, 0x35, 0x9E, 0x1A, 0x89];
        iu[32] = self.rng.pick(&opcodes);
        if self.rng.chance(100_000) {
            iu[32] = self.rng.bits() as u8;
        }
        for byte in &mut iu[33..48] {
            *byte = if self.rng.chance(150_000) { self.rng.bits() as u8 } else { 0 };
        }
        iu[40] = self.rng.below(4) as u8;
        let formats = [0x10, 0x01, 0x20, 0x02, 0x11, 0x22, 0x30, 0x03, 0x00];
        iu[5] = self.rng.pick(&formats);
        for nibble in [iu[5] >> 4, iu[5] & 0x0F] {
            match nibble {
                1 => self.desc(&mut iu, net),
                2 => self.indirect(&mut iu, net),
                3 => {
                    iu.extend(self.rng.pick(&[0u32, 8, 100, 512, u32::MAX]).to_be_bytes());
                    iu.resize(self.rng.pick(&[68usize, 76, 168, 200, 60]), 0x11);
                }
                _ => {}
            }
        }
        iu
    }

    fn desc(&mut self, iu: &mut Vec<u8>, net: &mut Net) {
        let memory = &net.memory[self.index];
        let va = memory.va(self.rng.index(MEMORY));
        let key = if self.rng.chance(950_000) { self.key } else { self.rng.bits() as u32 };
        let len = self.rng.pick(&[0u32, 1, 8, 24, 512, 512, 1024, 4096, 0x7FFF_FFFF, u32::MAX]);
        iu.extend(va.to_be_bytes());
        iu.extend(key.to_be_bytes());
        iu.extend(len.to_be_bytes());
    }

    fn indirect(&mut self, iu: &mut Vec<u8>, net: &mut Net) {
        let count = self.rng.below(4) as u32;
        let all = count + self.rng.pick(&[0, 0, 0, 1, 100, 100_000]);
        let memory = &net.memory[self.index];
        iu.extend(memory.va(self.rng.index(MEMORY)).to_be_bytes());
        iu.extend(self.key.to_be_bytes());
        iu.extend((all * 16).to_be_bytes());
        let total_at = iu.len();
        iu.extend([0; 4]);
        let mut total = 0u32;
        for _ in 0..count {
            self.desc(iu, net);
            let len: [u8; 4] = iu[iu.len() - 4..].try_into().expect("4 bytes");
            total = total.wrapping_add(u32::from_be_bytes(len));
        }
        if self.rng.chance(100_000) {
            total = self.rng.bits() as u32;
        }
        iu[total_at..total_at + 4].copy_from_slice(&total.to_be_bytes());
        iu[6] = count as u8;
        iu[7] = count as u8;
    }
}
