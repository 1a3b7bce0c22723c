//! Connection management of the simulated network: the target's side ([`SimCm`]) and what an
//! initiator host can do.

use std::time::Duration;

use usurp_fabric::{Cm, CmEvent, ConnId, FabricError, LoginFormat};
use usurp_reactor::Nanos;

use super::link::{CmWhat, InitEvent, Link};
use super::{Net, Shared, SimEndpoint};

/// The target's connection manager.
pub struct SimCm {
    net: Shared,
}

impl SimCm {
    /// The one of this network.
    pub fn new(net: Shared) -> SimCm {
        SimCm { net }
    }
}

fn bad(conn: ConnId, why: &'static str) -> FabricError {
    FabricError::BadConnection { conn, why }
}

impl Cm for SimCm {
    type Endpoint = SimEndpoint;

    fn next_event(&mut self, _timeout: Option<Duration>) -> Result<Option<CmEvent>, FabricError> {
        let net = &mut *self.net.borrow_mut();
        let now = net.now;
        let start = net.rng.index(net.live.len().max(1));
        for i in 0..net.live.len() {
            let at = net.live[(start + i) % net.live.len()];
            let events = &mut net.links[at].cm_events;
            if events.front().is_none_or(|(due, _)| *due > now) {
                continue;
            }
            let (_, what) = events.pop_front().expect("it was looked at");
            let conn = ConnId(at as u64);
            net.note("cm-event", at as u64, 0);
            return Ok(Some(match what {
                CmWhat::Request(format, private_data) => {
                    let peer = format!("host {}", net.links[at].host);
                    CmEvent::ConnectRequest { conn, listener: 0, peer, format, private_data }
                }
                CmWhat::Established => CmEvent::Established { conn },
                CmWhat::Disconnected(why) => CmEvent::Disconnected { conn, why: why.into() },
            }));
        }
        Ok(None)
    }

    fn endpoint(&mut self, conn: ConnId) -> Result<SimEndpoint, FabricError> {
        let net = &mut *self.net.borrow_mut();
        let fails = net.config.setup_fails_ppm;
        if net.fault(fails) {
            return Err(bad(conn, "no resources (injected)"));
        }
        let link = &mut net.links[conn.0 as usize];
        assert!(!link.endpoint_out && !link.destroyed, "endpoint of {conn:?} is asked for twice");
        link.endpoint_out = true;
        Ok(SimEndpoint { link: conn.0 as usize })
    }

    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError> {
        let net = &mut *self.net.borrow_mut();
        let at = conn.0 as usize;
        let (leg, fails) = (net.leg(), net.config.setup_fails_ppm);
        let fault = net.fault(fails);
        let now = net.now;
        let link = &mut net.links[at];
        assert!(!link.destroyed && !link.answered, "{conn:?} is answered twice");
        let posted = link.qp.as_ref().map_or(0, |qp| qp.recv.len());
        let credits = u32::from_be_bytes(private_data[4..8].try_into().expect("4 bytes"));
        let enough = posted >= credits as usize || link.qp.as_ref().is_some_and(|qp| qp.error);
        assert!(enough, "{conn:?} is promised {credits} credits with {posted} receives posted");
        link.answered = true;
        if fault || link.cm_lost {
            return Err(bad(conn, "the peer is gone"));
        }
        link.init_recvs = credits + 1;
        link.init_events.push_back((now + leg, InitEvent::Accepted(private_data.to_vec())));
        net.note("accept", at as u64, 0);
        Ok(())
    }

    fn reject(&mut self, conn: ConnId, private_data: &[u8]) {
        let net = &mut *self.net.borrow_mut();
        let leg = net.leg();
        let due = net.now + leg;
        let link = &mut net.links[conn.0 as usize];
        assert!(!link.answered, "{conn:?} is rejected after its answer");
        link.answered = true;
        link.init_lost = true;
        link.init_events.push_back((due, InitEvent::Rejected(private_data.to_vec())));
        net.note("reject", conn.0, private_data[7].into());
    }

    fn disconnect(&mut self, conn: ConnId) {
        let net = &mut *self.net.borrow_mut();
        let at = conn.0 as usize;
        if net.links[at].destroyed {
            return;
        }
        net.note("disconnect", conn.0, 0);
        let leg = net.leg();
        net.lose_init(at, leg);
        net.lose_cm(at, 2 * leg, "we disconnected");
    }

    fn destroy(&mut self, conn: ConnId, ep: Option<SimEndpoint>) {
        let net = &mut *self.net.borrow_mut();
        let at = conn.0 as usize;
        let leg = net.leg();
        let link = &mut net.links[at];
        assert!(ep.as_ref().is_none_or(|ep| ep.link == at), "an endpoint of another connection");
        if link.destroyed {
            assert!(ep.is_none(), "{conn:?} is destroyed twice");
            return;
        }
        assert!(link.qp.is_none(), "{conn:?} is destroyed before its queue pair");
        assert_eq!(ep.is_some(), link.endpoint_out, "{conn:?}: where is its endpoint?");
        link.endpoint_out = false;
        link.destroyed = true;
        link.cm_events.clear();
        link.to_target.clear();
        net.note("destroy", conn.0, 0);
        net.lose_init(at, leg);
    }
}

/// What an initiator does.
impl Net {
    /// Asks for a connection. Its number.
    pub fn connect(&mut self, host: usize, format: LoginFormat, private_data: Vec<u8>) -> usize {
        let honest = self.memory[host].honest;
        let at = self.links.len();
        let due = self.now + self.leg();
        let mut link = Link::new(host, honest);
        link.cm_events.push_back((due, CmWhat::Request(format, private_data)));
        self.links.push(link);
        self.live.push(at);
        self.note("connect", at as u64, host as u64);
        at
    }

    /// What has become of the connection, once.
    pub fn init_event(&mut self, at: usize) -> Option<InitEvent> {
        let now = self.now;
        let link = &mut self.links[at];
        link.init_events.front().filter(|(due, _)| *due <= now)?;
        let (_, event) = link.init_events.pop_front().expect("it was looked at");
        if event == InitEvent::Lost {
            // The initiator's side of the connection manager says goodbye, which may take long.
            let leg = 3 * self.leg();
            self.lose_cm(at, leg, "the peer disconnected");
        }
        let link = &mut self.links[at];
        if !matches!(event, InitEvent::Accepted(_)) {
            link.peer_up = false;
            link.to_init.clear();
        }
        Some(event)
    }

    /// The initiator has its answer and says so (RTU), which may take longer than its first IU.
    pub fn init_ready(&mut self, at: usize) {
        let due = self.now + 2 * self.leg();
        let link = &mut self.links[at];
        if !link.cm_lost && !link.destroyed {
            link.cm_events.push_back((due, CmWhat::Established));
        }
    }

    /// Sends an IU.
    pub fn init_send(&mut self, at: usize, iu: &[u8]) {
        let due = self.now + self.leg();
        let link = &mut self.links[at];
        let last = link.to_target.back().map_or(0, |(t, _)| *t);
        link.to_target.push_back((due.max(last), iu.to_vec()));
        link.next = link.next.min(due.max(last));
    }

    /// The next IU that has come.
    pub fn init_recv(&mut self, at: usize) -> Option<Vec<u8>> {
        let now = self.now;
        let link = &mut self.links[at];
        link.to_init.front().filter(|(due, _)| *due <= now)?;
        link.to_init.pop_front().map(|(_, iu)| iu)
    }

    /// Posts a receive again.
    pub fn init_post_recv(&mut self, at: usize) {
        self.links[at].init_recvs += 1;
    }

    /// The initiator disconnects.
    pub fn init_disconnect(&mut self, at: usize) {
        let leg = self.leg();
        self.note("init-disc", at as u64, 0);
        let link = &mut self.links[at];
        link.peer_up = false;
        link.init_lost = true;
        link.init_events.clear();
        link.to_init.clear();
        self.lose_cm(at, leg, "the peer disconnected");
    }

    /// The initiator, or the cable, is gone. Nobody says so, but the target may find out by a time
    /// limit of its connection manager.
    pub fn vanish(&mut self, at: usize, cm_after: Option<Nanos>) {
        self.note("vanish", at as u64, cm_after.unwrap_or(0));
        let link = &mut self.links[at];
        link.peer_up = false;
        link.init_lost = true;
        link.init_events.clear();
        link.to_init.clear();
        if let Some(after) = cm_after {
            self.lose_cm(at, after, "no answer");
        }
    }

    /// Whether the target has received that many IUs of the link.
    pub fn delivered(&self, at: usize) -> u64 {
        self.links[at].delivered
    }
}
