//! Both roles of SRP wired together in memory: a simulated pair of queues, one seed, no clock.
//!
//! Checks at every step: credits are conserved over both ends and the wire, an ended tag is never
//! heard of again, what the target reads is what the initiator meant. At the end everything is
//! whole.

use std::collections::{HashMap, VecDeque};

use usurp_srp::initiator::{
    self, Event, InBuf, MemDesc, OutBuf, StartError, Table, linux_login, login_answer, login_req,
};
use usurp_srp::login::{self, Format, MultiChannel, MultiChannelResult, Policy};
use usurp_srp::target::{
    self, ChannelConfig, ChannelState, CmdResult, Command, DataDesc, IoctxId, IoctxState, Received,
    RspCode, TmFunc,
};
use usurp_srp::{PortId, Residual, Tag};

const CREDITS: u32 = 16;
const LUN: u64 = 1 << 48;

/// Numerical Recipes' LCG; good enough to mix orders.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

/// What the initiator meant with a command.
#[derive(Clone)]
struct Meant {
    cdb: Vec<u8>,
    out: Vec<MemDesc>,
    inn: Vec<MemDesc>,
    imm: Vec<u8>,
}

/// What the target does with a command that it holds.
struct Held {
    ioctx: IoctxId,
    user: u64,
    tag: Tag,
}

struct Pair {
    rng: Rng,
    i: initiator::Channel,
    t: target::Channel,
    /// IUs on their way to the target.
    to_t: VecDeque<Vec<u8>>,
    /// IUs on their way to the initiator, with the ioctx whose send completion follows.
    to_i: VecDeque<(Option<IoctxId>, Vec<u8>)>,
    /// IUs the target must offer again.
    wait: VecDeque<Vec<u8>>,
    /// Delivered sends whose completion the target has not seen.
    completions: VecDeque<Option<IoctxId>>,
    held: Vec<Held>,
    /// Tables in initiator memory, by address.
    tables: HashMap<u64, Vec<u8>>,
    meant: HashMap<u64, Meant>,
    outstanding: HashMap<u64, Tag>,
    /// Commands that an ABORT TASK was sent for.
    aborting: HashMap<u64, Tag>,
    next: u64,
    done: u64,
    aborted: u64,
    cred_reqs: u64,
}

impl Pair {
    fn new(seed: u64, credits: u32, ioctxs: u32, format: Format) -> Pair {
        let t_port = PortId::from_halves(7, 8);
        let policy = Policy { credits, ..Policy::new(t_port) };
        let req = linux_login(PortId::from_halves(0, 9), t_port, MultiChannel::Multi);
        let login = login::check(format, &login_req(format, &req), &policy).unwrap();
        let rsp = login.rsp(MultiChannelResult::Maintained);
        let granted = login_answer(&rsp, &req).unwrap();
        let cfg = ChannelConfig {
            credits,
            ioctxs,
            max_ti_iu_len: policy.max_ti_iu_len,
            max_transfer: 1 << 20,
            max_descs: 2048,
        };
        Pair {
            rng: Rng(seed),
            i: initiator::Channel::new(&granted, initiator::Config { slots: 64 }),
            t: target::Channel::new(&login, cfg),
            to_t: VecDeque::new(),
            to_i: VecDeque::new(),
            wait: VecDeque::new(),
            completions: VecDeque::new(),
            held: Vec::new(),
            tables: HashMap::new(),
            meant: HashMap::new(),
            outstanding: HashMap::new(),
            aborting: HashMap::new(),
            next: 0,
            done: 0,
            aborted: 0,
            cred_reqs: 0,
        }
    }

    fn descs(&mut self, n: u64) -> Vec<MemDesc> {
        let mut one = || MemDesc {
            va: self.rng.below(1 << 30) << 12,
            key: self.rng.below(1 << 20) as u32,
            len: 512 * (1 + self.rng.below(8)) as u32,
        };
        (0..n).map(|_| one()).collect()
    }

    /// Puts a table into initiator memory and describes it.
    fn table<'a>(&mut self, descs: &'a [MemDesc]) -> Table<'a> {
        let va = 0x1000_0000 + self.next * 0x10000 + self.tables.len() as u64 * 16;
        let mut bytes = Vec::new();
        for d in descs {
            let mut b = [0; 16];
            d.emit(&mut b);
            bytes.extend_from_slice(&b);
        }
        self.tables.insert(va, bytes);
        let in_iu = match self.rng.below(3) {
            0 => self.rng.below(descs.len() as u64 + 1) as usize,
            _ => descs.len().min(255),
        };
        Table { va, key: 77, descs, in_iu }
    }

    /// Starts a command of a random kind. False: no credit or no slot.
    fn start(&mut self) -> bool {
        let user = self.next;
        let mut cdb = vec![0; [6, 10, 16, 32][self.rng.below(4) as usize]];
        cdb[..6].copy_from_slice(&user.to_be_bytes()[2..]);
        let (n_out, n_in) = (1 + self.rng.below(20), 1 + self.rng.below(20));
        let (mut out, mut inn, mut imm) = (vec![], vec![], vec![]);
        match self.rng.below(7) {
            0 => {}
            1 => out = self.descs(1),
            2 => out = self.descs(n_out),
            3 => inn = self.descs(1),
            4 => inn = self.descs(n_in),
            5 => imm = vec![user as u8; 1 + self.rng.below(8192) as usize],
            _ => (out, inn) = (self.descs(n_out), self.descs(n_in)),
        }
        let data_out = match (out.as_slice(), imm.as_slice()) {
            ([], []) => OutBuf::None,
            ([], data) => OutBuf::Immediate(data),
            ([one], _) => OutBuf::Direct(*one),
            (many, _) => OutBuf::Table(self.table(many)),
        };
        let data_in = match inn.as_slice() {
            [] => InBuf::None,
            [one] => InBuf::Direct(*one),
            many => InBuf::Table(self.table(many)),
        };
        let mut iu = vec![0xA5; 8260];
        match self.i.start_cmd(&cdb, LUN, data_out, data_in, user, &mut iu) {
            Ok((tag, len)) => {
                iu.truncate(len);
                self.to_t.push_back(iu);
                self.outstanding.insert(user, tag);
                self.meant.insert(user, Meant { cdb, out, inn, imm });
                self.next += 1;
                true
            }
            Err(StartError::NoCredit | StartError::NoSlot) => false,
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Sends an ABORT TASK for some outstanding command.
    fn abort(&mut self) {
        let idle = |u: &&u64| !self.aborting.contains_key(u);
        let Some(&user) = self.outstanding.keys().filter(idle).min() else { return };
        let mut iu = vec![0xA5; 48];
        let task = self.outstanding[&user];
        if let Ok((tag, len)) = self.i.abort_task(task, user, &mut iu) {
            assert_eq!(len, 48);
            self.aborting.insert(user, tag);
            self.to_t.push_back(iu);
        }
    }

    /// The target takes in one IU.
    fn target_receives(&mut self) {
        let (iu, again) = match self.wait.pop_front() {
            Some(iu) => (iu, true),
            None => match self.to_t.pop_front() {
                Some(iu) => (iu, false),
                None => return,
            },
        };
        let before = (self.t.credits(), self.t.in_use());
        match self.t.on_iu(&iu) {
            Received::Wait => {
                assert_eq!((self.t.credits(), self.t.in_use()), before);
                self.wait.push_front(iu);
                if again && self.wait.len() < 8 {
                    self.wait.extend(self.to_t.pop_front());
                }
            }
            Received::Command(cmd) => self.on_command(cmd, &iu),
            Received::TaskMgmt { ioctx, func, task_tag, lun } => {
                assert_eq!((func, lun), (TmFunc::AbortTask, LUN));
                if let Some(id) = self.t.find(task_tag) {
                    assert_eq!(self.t.ioctx_state(id), IoctxState::Active);
                    self.t.finish_silently(id);
                    self.held.retain(|h| h.ioctx != id);
                    assert_eq!(self.t.find(task_tag), None);
                }
                let mut buf = vec![0xA5; 512];
                let n = self.t.tsk_rsp(ioctx, RspCode::COMPLETE, &mut buf);
                self.send(Some(ioctx), &buf[..n]);
            }
            Received::Consumed => {}
            other => panic!("{other:?}"),
        }
    }

    /// What the target understood is what the initiator meant.
    fn on_command(&mut self, cmd: Command, iu: &[u8]) {
        let mut user = [0; 8];
        user[2..].copy_from_slice(&cmd.cdb[..6]);
        let user = u64::from_be_bytes(user);
        let meant = self.meant[&user].clone();
        let mut cdb = meant.cdb.clone();
        cdb.resize(cdb.len().max(16), 0);
        assert_eq!(cmd.cdb(), cdb);
        assert_eq!(cmd.lun, LUN);
        self.same_buffer(&cmd.data_out, &meant.out, &meant.imm, iu);
        self.same_buffer(&cmd.data_in, &meant.inn, &[], iu);
        self.held.push(Held { ioctx: cmd.ioctx, user, tag: cmd.tag });
        assert_eq!(self.t.find(cmd.tag), Some(cmd.ioctx));
    }

    fn same_buffer(&self, desc: &DataDesc, meant: &[MemDesc], imm: &[u8], iu: &[u8]) {
        let len: usize = meant.iter().map(|d| d.len as usize).sum();
        assert_eq!(desc.len() as usize, len + imm.len());
        assert_eq!(desc.immediate(iu).unwrap_or_default(), imm);
        let got: Vec<MemDesc> = match *desc {
            DataDesc::Indirect { table, .. } if desc.is_partial() => {
                let bytes = &self.tables[&table.va];
                assert_eq!(target::check_table(desc, bytes), Ok(()));
                target::table_descs(bytes).collect()
            }
            _ => target::descs(desc, iu).collect(),
        };
        assert_eq!(got, meant);
    }

    fn send(&mut self, ioctx: Option<IoctxId>, iu: &[u8]) {
        self.to_i.push_back((ioctx, iu.to_vec()));
    }

    /// The target ends one of the commands it holds.
    fn target_responds(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let h = self.held.swap_remove(self.rng.below(self.held.len() as u64) as usize);
        assert_eq!(self.t.tag(h.ioctx), h.tag);
        let sense = [h.user as u8; 18];
        let result = match self.rng.below(3) {
            0 => CmdResult { status: 2, sense: &sense, ..CmdResult::default() },
            1 => CmdResult { data_in: Residual::of(h.user, 1000), ..CmdResult::default() },
            _ => CmdResult::default(),
        };
        let mut buf = vec![0xA5; 512];
        let n = self.t.rsp(h.ioctx, &result, &mut buf);
        self.send(Some(h.ioctx), &buf[..n]);
    }

    fn target_grants(&mut self) {
        let mut buf = [0xA5; 16];
        if let Some(n) = self.t.cred_req(&mut buf) {
            self.cred_reqs += 1;
            self.send(None, &buf[..n]);
        }
    }

    fn initiator_receives(&mut self) {
        let Some((ioctx, iu)) = self.to_i.pop_front() else { return };
        self.completions.push_back(ioctx);
        match self.i.on_iu(&iu) {
            Event::Done(d) => {
                assert_eq!(self.outstanding.remove(&d.user), Some(d.tag));
                self.meant.remove(&d.user);
                if d.status == 2 {
                    assert_eq!(d.sense, [d.user as u8; 18]);
                } else if d.data_in != Residual::None {
                    assert_eq!(d.data_in, Residual::of(d.user, 1000));
                }
                self.done += 1;
            }
            Event::TmDone { user, tag, code, aborted } => {
                assert_eq!(self.aborting.remove(&user), Some(tag));
                assert_eq!(code, Some(RspCode::COMPLETE));
                if aborted.is_some() {
                    assert_eq!(aborted, Some(user));
                    self.outstanding.remove(&user).unwrap();
                    self.meant.remove(&user);
                    self.aborted += 1;
                }
            }
            Event::CredReq { answer, .. } => self.to_t.push_back(answer.to_vec()),
            other => panic!("{other:?}"),
        }
    }

    fn target_completes(&mut self) {
        match self.completions.pop_front() {
            Some(Some(ioctx)) => self.t.on_sent(ioctx),
            Some(None) => self.t.on_cred_req_sent(),
            None => {}
        }
    }

    /// Credits at both ends and on the wire are those of the login.
    fn conserved(&self) {
        let requests = |q: &VecDeque<Vec<u8>>| q.iter().filter(|iu| iu[0] & 0x40 == 0).count();
        let coming = requests(&self.to_t) + requests(&self.wait);
        let delta = |iu: &[u8]| u32::from_be_bytes(iu[4..8].try_into().unwrap());
        let going: u32 = self.to_i.iter().map(|(_, iu)| delta(iu)).sum();
        let c = self.t.credits();
        let wire = coming as u32 + going;
        assert_eq!(self.i.req_lim() + wire + c.in_flight() + c.owed(), c.given());
        assert_eq!(c.held(), self.i.req_lim() + wire);
    }

    fn step(&mut self, aborts: bool) {
        match self.rng.below(if aborts { 16 } else { 15 }) {
            0..=3 => drop(self.start()),
            4..=7 => self.target_receives(),
            8 | 9 => self.target_responds(),
            10 | 11 => self.initiator_receives(),
            12 | 13 => self.target_completes(),
            14 => self.target_grants(),
            _ => self.abort(),
        }
        self.conserved();
    }

    /// Lets everything end, without new commands.
    fn quiesce(&mut self) {
        for _ in 0..10_000 {
            self.target_completes();
            self.target_receives();
            self.target_responds();
            self.target_grants();
            self.initiator_receives();
            self.conserved();
        }
        assert!(self.t.is_whole());
        assert_eq!((self.outstanding.len(), self.i.outstanding()), (0, 0));
        assert_eq!(self.i.req_lim(), self.t.credits().given(), "all credit is back");
        assert_eq!(self.t.credits().held(), self.t.credits().given());
        assert_eq!(self.t.overruns(), 0);
    }
}

#[test]
fn thousands_of_commands_of_every_kind_with_aborts() {
    for seed in 0..20 {
        let format = if seed % 2 == 0 { Format::IbCm64 } else { Format::RdmaCm56 };
        let mut p = Pair::new(seed, CREDITS, CREDITS * 2, format);
        for _ in 0..50 {
            p.step(true); // CONNECTING: everything waits
        }
        assert_eq!((p.t.in_use(), p.done), (0, 0));
        p.t.advance(ChannelState::Live);
        for _ in 0..20_000 {
            p.step(true);
        }
        p.quiesce();
        assert!(p.done > 1000, "{} done", p.done);
        assert!(p.aborted > 20, "{} aborted", p.aborted);
        assert_eq!(p.done + p.aborted, p.next);
    }
}

#[test]
fn few_send_ioctxs_make_ius_wait_but_lose_nothing() {
    for seed in 100..110 {
        let mut p = Pair::new(seed, CREDITS, 3, Format::IbCm64);
        p.t.advance(ChannelState::Live);
        for _ in 0..20_000 {
            p.step(seed % 2 == 0);
        }
        p.quiesce();
        assert!(p.done > 500, "{} done", p.done);
    }
}

#[test]
fn commands_are_taken_in_the_order_they_were_sent() {
    let mut p = Pair::new(5, CREDITS, 4, Format::IbCm64);
    for _ in 0..8 {
        assert!(p.start());
    }
    p.t.advance(ChannelState::Live);
    let mut order = Vec::new();
    for _ in 0..200 {
        p.target_receives();
        if let Some(h) = p.held.first() {
            order.push(h.user);
        }
        p.target_responds();
        p.initiator_receives();
        p.target_completes();
    }
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    p.quiesce();
}

/// Known bug C1: everything is aborted by others (no response at all), then I/O must go on.
#[test]
fn after_everything_was_ended_silently_io_continues() {
    let mut p = Pair::new(1, CREDITS, CREDITS * 2, Format::IbCm64);
    p.t.advance(ChannelState::Live);
    for _ in 0..10 {
        while p.start() {}
        while !p.to_t.is_empty() {
            p.target_receives();
        }
        assert!(!p.start(), "the window is used up");
        for h in std::mem::take(&mut p.held) {
            p.t.finish_silently(h.ioctx);
        }
        while let Some(tag) = p.i.any_cmd(None) {
            let user = p.i.forget(tag).unwrap();
            p.outstanding.remove(&user).unwrap();
        }
        assert!(!p.start(), "no credit: locked up but for the CRED_REQ");
        p.target_grants();
        p.initiator_receives();
        assert!(p.start());
        p.quiesce();
    }
    assert!(p.cred_reqs >= 10);
}

/// Known bug C4: unknown IUs must not eat credit. This initiator pays for each, as a stupid one
/// would.
#[test]
fn two_hundred_unknown_ius_cost_nothing_in_the_end() {
    let mut p = Pair::new(1, CREDITS, CREDITS * 2, Format::IbCm64);
    p.t.advance(ChannelState::Live);
    let mut pays = CREDITS;
    for n in 0..200_u32 {
        if pays == 0 {
            let mut buf = [0; 16];
            assert_eq!(p.t.cred_req(&mut buf), Some(16), "after {n}");
            pays += u32::from_be_bytes(buf[4..8].try_into().unwrap());
            p.t.on_cred_req_sent();
            let mut answer = [0; 16];
            answer[0] = 0x41;
            assert_eq!(p.t.on_iu(&answer), Received::Consumed);
        }
        pays -= 1;
        let opcode = [0x00, 0x04, 0x20, 0x81, 0x80][n as usize % 5];
        assert_eq!(p.t.on_iu(&[opcode; 64]), Received::Consumed);
        assert_eq!(p.t.on_iu(&[0xC1; 64]), Received::Consumed, "a response is free");
        assert_eq!(p.t.credits().held(), pays);
    }
    let mut buf = [0; 16];
    if p.t.cred_req(&mut buf).is_some() {
        p.t.on_cred_req_sent();
        p.t.on_iu(&[0x41; 16]);
    }
    assert_eq!(p.t.credits().held(), CREDITS);
    for _ in 0..2000 {
        p.step(false);
    }
    p.quiesce();
    assert!(p.done > 100);
}

/// A channel dies with requests in every state; nothing is left.
#[test]
fn a_channel_that_goes_can_be_emptied() {
    for seed in 0..50 {
        let mut p = Pair::new(seed, CREDITS, CREDITS * 2, Format::IbCm64);
        p.t.advance(ChannelState::Live);
        for _ in 0..200 + seed * 7 {
            p.step(true);
        }
        p.t.advance(ChannelState::Draining);
        for h in std::mem::take(&mut p.held) {
            match p.rng.below(2) {
                0 => p.t.finish_silently(h.ioctx),
                _ => {
                    p.t.rsp(h.ioctx, &CmdResult::default(), &mut [0; 64]);
                    p.t.unpost(h.ioctx);
                }
            }
        }
        while let Some((ioctx, _)) = p.to_i.pop_front() {
            p.completions.push_back(ioctx); // flushed
        }
        while !p.completions.is_empty() {
            p.target_completes();
        }
        assert_eq!(p.t.live().count(), 0);
        assert!(p.t.is_whole());
        assert_eq!(p.t.credits().in_flight(), 0);
    }
}
