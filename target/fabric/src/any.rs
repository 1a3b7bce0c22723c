//! All fabrics behind one: what a target with listeners of different kinds uses.
//!
//! ```text
//!   AnyFabric ──┬── ShmFabric                QpNum with QP_NUM_BIT clear
//!               └── VerbsFabric, if wanted   QpNum with QP_NUM_BIT set
//!   AnyCm ──────┬── shm::Listener            ConnId from 2^32
//!               └── verbs::Listener          ConnId below 2^32
//! ```
//!
//! Invariants: an arena has the same key in both fabrics, because both are told of the same arenas
//! in the same order; it is registered once, however often that is asked for. Without a verbs
//! fabric each call is the shm fabric's behind one comparison.

#[cfg(feature = "verbs")]
use crate::verbs;
use crate::{
    Cm, CmEvent, CompletionBatch, ConnId, Fabric, FabricError, Lkey, PostError, QpLimits, QpNum,
    RecvWr, SendWr, shm,
};
#[cfg(feature = "verbs")]
use rustix::event::{PollFd, PollFlags, poll};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "verbs")]
use std::time::Instant;
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

/// An endpoint of either fabric.
pub enum Endpoint {
    /// Of the shm fabric.
    Shm(shm::Endpoint),
    /// Of the verbs fabric.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Endpoint),
}

/// The data plane of one reactor over all fabrics.
pub struct AnyFabric {
    shm: shm::ShmFabric,
    #[cfg(feature = "verbs")]
    verbs: Option<verbs::VerbsFabric>,
    /// Which fabric the next poll asks first.
    #[cfg(feature = "verbs")]
    verbs_first: bool,
    /// Arenas that have a key, and their keys.
    arenas: Vec<(Arc<Arena>, Lkey)>,
}

impl AnyFabric {
    /// Over shared memory only.
    pub fn new(shm: shm::ShmFabric) -> AnyFabric {
        AnyFabric {
            shm,
            #[cfg(feature = "verbs")]
            verbs: None,
            #[cfg(feature = "verbs")]
            verbs_first: false,
            arenas: Vec::new(),
        }
    }

    /// Over RDMA devices as well. Before anything is registered or adopted.
    #[cfg(feature = "verbs")]
    pub fn with_verbs(mut self, verbs: verbs::VerbsFabric) -> AnyFabric {
        assert!(self.arenas.is_empty(), "fabrics are joined before arenas are registered");
        self.verbs = Some(verbs);
        self
    }
}

/// Calls a method of the fabric that a queue pair belongs to.
#[cfg(feature = "verbs")]
macro_rules! of_qp {
    ($self:ident, $qp:ident, $fabric:ident => $call:expr) => {
        match &mut $self.verbs {
            Some($fabric) if $qp.0 & verbs::QP_NUM_BIT != 0 => $call,
            _ => {
                let $fabric = &mut $self.shm;
                $call
            }
        }
    };
}
#[cfg(not(feature = "verbs"))]
macro_rules! of_qp {
    ($self:ident, $qp:ident, $fabric:ident => $call:expr) => {{
        let $fabric = &mut $self.shm;
        $call
    }};
}

impl Fabric for AnyFabric {
    type Endpoint = Endpoint;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        if let Some((_, lkey)) = self.arenas.iter().find(|(a, _)| Arc::ptr_eq(a, arena)) {
            return Ok(*lkey);
        }
        // The one that may fail for want of memory first: nothing is to be taken back then.
        #[cfg(feature = "verbs")]
        let twin = self.verbs.as_mut().map(|v| v.register(arena)).transpose()?;
        let lkey = self.shm.register(arena)?;
        #[cfg(feature = "verbs")]
        assert!(twin.is_none_or(|twin| twin == lkey), "an arena has two keys");
        self.arenas.push((arena.clone(), lkey));
        Ok(lkey)
    }

    fn adopt(&mut self, ep: Endpoint) -> Result<QpNum, (FabricError, Endpoint)> {
        match ep {
            Endpoint::Shm(ep) => self.shm.adopt(ep).map_err(|(e, ep)| (e, Endpoint::Shm(ep))),
            #[cfg(feature = "verbs")]
            Endpoint::Verbs(ep) => {
                let verbs = self.verbs.as_mut().expect("only a verbs listener makes these");
                verbs.adopt(ep).map_err(|(e, ep)| (e, Endpoint::Verbs(ep)))
            }
        }
    }

    #[inline]
    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        of_qp!(self, qp, fabric => fabric.post_recv(qp, list))
    }

    #[inline]
    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        of_qp!(self, qp, fabric => fabric.post_send(qp, list))
    }

    #[inline]
    fn poll(&mut self, now: Nanos, out: &mut CompletionBatch) -> usize {
        #[cfg(feature = "verbs")]
        if let Some(verbs) = &mut self.verbs {
            self.verbs_first = !self.verbs_first;
            let mut got = 0;
            if self.verbs_first {
                got += verbs.poll(now, out);
            }
            got += self.shm.poll(now, out);
            if !self.verbs_first {
                got += verbs.poll(now, out);
            }
            return got;
        }
        self.shm.poll(now, out)
    }

    fn set_error(&mut self, qp: QpNum) {
        of_qp!(self, qp, fabric => fabric.set_error(qp));
    }

    fn is_drained(&self, qp: QpNum) -> bool {
        #[cfg(feature = "verbs")]
        if let Some(verbs) = self.verbs.as_ref().filter(|_| qp.0 & verbs::QP_NUM_BIT != 0) {
            return verbs.is_drained(qp);
        }
        self.shm.is_drained(qp)
    }

    fn release(&mut self, qp: QpNum) -> Endpoint {
        #[cfg(feature = "verbs")]
        if let Some(verbs) = self.verbs.as_mut().filter(|_| qp.0 & verbs::QP_NUM_BIT != 0) {
            return Endpoint::Verbs(verbs.release(qp));
        }
        Endpoint::Shm(self.shm.release(qp))
    }

    fn limits(&self, qp: QpNum) -> QpLimits {
        #[cfg(feature = "verbs")]
        if let Some(verbs) = self.verbs.as_ref().filter(|_| qp.0 & verbs::QP_NUM_BIT != 0) {
            return verbs.limits(qp);
        }
        self.shm.limits(qp)
    }
}

/// Addresses of this machine's RDMA ports that a listener at `at` would serve, and the devices'
/// names. Listens at nothing, so it may be asked while a target runs.
#[cfg(feature = "verbs")]
pub fn rdma_addresses_at(at: SocketAddr) -> Result<Vec<(SocketAddr, String)>, FabricError> {
    Ok(verbs::addresses_at(at)?.into_iter().map(|a| (a.addr, a.device)).collect())
}

/// The same: not in this build.
#[cfg(not(feature = "verbs"))]
pub fn rdma_addresses_at(at: SocketAddr) -> Result<Vec<(SocketAddr, String)>, FabricError> {
    Err(without_verbs(at))
}

/// This build cannot do anything by RDMA.
#[cfg(not(feature = "verbs"))]
fn without_verbs(at: SocketAddr) -> FabricError {
    FabricError::Invalid(format!("rdma_cm {at}: this binary was built without the feature `verbs`"))
}

/// Which listener of which fabric.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
enum Which {
    Shm(usize),
    #[cfg(feature = "verbs")]
    Verbs(usize),
}

/// Connection management of all fabrics.
pub struct AnyCm {
    shm: shm::Listener,
    #[cfg(feature = "verbs")]
    verbs: Option<verbs::Listener>,
    /// Ends waits when there are two fabrics to wait for; otherwise the shm listener's own does.
    #[cfg(feature = "verbs")]
    waker: shm::Waker,
    /// All listeners, in order of creation.
    listeners: Vec<Which>,
}

impl AnyCm {
    /// Over shared memory only.
    pub fn new(shm: shm::Listener) -> AnyCm {
        AnyCm {
            #[cfg(feature = "verbs")]
            waker: shm.waker(),
            shm,
            #[cfg(feature = "verbs")]
            verbs: None,
            listeners: Vec::new(),
        }
    }

    /// Over RDMA devices as well. Before a waker is handed out.
    #[cfg(feature = "verbs")]
    pub fn with_verbs(mut self, verbs: verbs::Listener) -> Result<AnyCm, FabricError> {
        self.waker = shm::Waker::new()?;
        self.verbs = Some(verbs);
        Ok(self)
    }

    /// Listens at a socket with file mode `mode`; returns the listener's index.
    pub fn listen_shm(&mut self, path: &Path, mode: u32) -> Result<usize, FabricError> {
        let index = self.shm.listen(path, mode)?;
        self.listeners.push(Which::Shm(index));
        Ok(self.listeners.len() - 1)
    }

    /// Listens for connections by RDMA/CM; returns the listener's index.
    #[cfg(feature = "verbs")]
    pub fn listen_rdma(&mut self, addr: SocketAddr) -> Result<usize, FabricError> {
        let verbs = self.verbs.as_mut().expect("`with_verbs` was called");
        let index = verbs.listen(addr)?;
        self.listeners.push(Which::Verbs(index));
        Ok(self.listeners.len() - 1)
    }

    /// Listens for connections by RDMA/CM: not in this build.
    #[cfg(not(feature = "verbs"))]
    pub fn listen_rdma(&mut self, addr: SocketAddr) -> Result<usize, FabricError> {
        Err(without_verbs(addr))
    }

    /// Where initiators can connect to by an RDMA listener: address, and the device's name.
    pub fn rdma_addresses(&self, index: usize) -> Vec<(SocketAddr, String)> {
        #[cfg(feature = "verbs")]
        if let (Some(Which::Verbs(at)), Some(verbs)) = (self.listeners.get(index), &self.verbs) {
            return verbs.addresses(*at).into_iter().map(|a| (a.addr, a.device)).collect();
        }
        let _ = index;
        Vec::new()
    }

    /// A handle that ends a wait in `next_event`.
    pub fn waker(&self) -> shm::Waker {
        #[cfg(feature = "verbs")]
        return self.waker.clone();
        #[cfg(not(feature = "verbs"))]
        return self.shm.waker();
    }

    /// An event as the caller sees it: with our index of its listener.
    fn rename(&self, event: CmEvent, which: fn(usize) -> Which) -> CmEvent {
        let index = |inner| {
            let at = self.listeners.iter().position(|w| *w == which(inner));
            at.expect("every listener is in the table")
        };
        match event {
            CmEvent::ConnectRequest { conn, listener, peer, format, private_data } => {
                let listener = index(listener);
                CmEvent::ConnectRequest { conn, listener, peer, format, private_data }
            }
            CmEvent::ListenerGone { listener, why } => {
                CmEvent::ListenerGone { listener: index(listener), why }
            }
            other => other,
        }
    }

    /// Waits for either fabric or the waker; true = somebody woke us.
    #[cfg(feature = "verbs")]
    fn wait(&self, until: Option<Instant>) -> Result<bool, FabricError> {
        let verbs = self.verbs.as_ref().expect("two fabrics");
        let deadlines = [until, self.shm.next_deadline(), verbs.next_deadline()];
        let left = deadlines.into_iter().flatten().min();
        let left = left.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.map(|d| rustix::time::Timespec {
            tv_sec: d.as_secs().min(1 << 20) as i64,
            tv_nsec: d.subsec_nanos().into(),
        });
        let mut fds = [
            PollFd::new(&self.waker, PollFlags::IN),
            PollFd::new(&self.shm, PollFlags::IN),
            PollFd::new(verbs, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(e) => return Err(FabricError::os("poll", e)),
        }
        let woken = !fds[0].revents().is_empty();
        if woken {
            self.waker.clear();
        }
        Ok(woken)
    }

    #[cfg(feature = "verbs")]
    fn next_of_two(&mut self, until: Option<Instant>) -> Result<Option<CmEvent>, FabricError> {
        loop {
            if let Some(event) = self.shm.next_event(Some(Duration::ZERO))? {
                return Ok(Some(self.rename(event, Which::Shm)));
            }
            let verbs = self.verbs.as_mut().expect("two fabrics");
            if let Some(event) = verbs.next_event(Some(Duration::ZERO))? {
                return Ok(Some(self.rename(event, Which::Verbs)));
            }
            let late = until.is_some_and(|at| at <= Instant::now());
            if late || self.wait(until)? {
                return Ok(None);
            }
        }
    }
}

/// Calls a method of the connection manager that a connection belongs to.
#[cfg(feature = "verbs")]
macro_rules! of_conn {
    ($self:ident, $conn:ident, $cm:ident => $call:expr) => {
        match &mut $self.verbs {
            Some($cm) if verbs::is_ours($conn) => $call,
            _ => {
                let $cm = &mut $self.shm;
                $call
            }
        }
    };
}
#[cfg(not(feature = "verbs"))]
macro_rules! of_conn {
    ($self:ident, $conn:ident, $cm:ident => $call:expr) => {{
        let $cm = &mut $self.shm;
        $call
    }};
}

impl Cm for AnyCm {
    type Endpoint = Endpoint;

    fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<CmEvent>, FabricError> {
        #[cfg(feature = "verbs")]
        if self.verbs.is_some() {
            return self.next_of_two(timeout.map(|t| Instant::now() + t));
        }
        let event = self.shm.next_event(timeout)?;
        Ok(event.map(|event| self.rename(event, Which::Shm)))
    }

    fn endpoint(&mut self, conn: ConnId) -> Result<Endpoint, FabricError> {
        #[cfg(feature = "verbs")]
        if let Some(verbs) = self.verbs.as_mut().filter(|_| verbs::is_ours(conn)) {
            return verbs.endpoint(conn).map(Endpoint::Verbs);
        }
        self.shm.endpoint(conn).map(Endpoint::Shm)
    }

    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError> {
        of_conn!(self, conn, cm => cm.accept(conn, private_data))
    }

    fn reject(&mut self, conn: ConnId, private_data: &[u8]) {
        of_conn!(self, conn, cm => cm.reject(conn, private_data));
    }

    fn disconnect(&mut self, conn: ConnId) {
        of_conn!(self, conn, cm => cm.disconnect(conn));
    }

    fn destroy(&mut self, conn: ConnId, ep: Option<Endpoint>) {
        match ep {
            None => of_conn!(self, conn, cm => cm.destroy(conn, None)),
            Some(Endpoint::Shm(ep)) => self.shm.destroy(conn, Some(ep)),
            #[cfg(feature = "verbs")]
            Some(Endpoint::Verbs(ep)) => {
                let verbs = self.verbs.as_mut().expect("only a verbs listener makes these");
                verbs.destroy(conn, Some(ep));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{FabricConfig, ListenerParams, ShmFabric};
    use usurp_reactor::mem::HugePolicy;

    fn arena(name: &str) -> Arc<Arena> {
        Arena::new(name, 4096, HugePolicy::Never).unwrap()
    }

    #[test]
    fn an_arena_keeps_its_key_however_often_it_is_registered() {
        let mut fabric = AnyFabric::new(ShmFabric::new(FabricConfig { max_qps: 2 }));
        let (a, b) = (arena("a"), arena("b"));
        let first = fabric.register(&a).unwrap();
        let second = fabric.register(&b).unwrap();
        assert_ne!(first, second);
        for _ in 0..1000 {
            assert_eq!(fabric.register(&a).unwrap(), first);
        }
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn one_key_names_an_arena_in_both_fabrics() {
        let qp = verbs::QpConfig { max_send_wr: 4, max_recv_wr: 4 };
        let verbs = verbs::VerbsFabric::new(verbs::FabricConfig { max_qps: 2, qp });
        let shm = ShmFabric::new(FabricConfig { max_qps: 2 });
        let mut fabric = AnyFabric::new(shm).with_verbs(verbs);
        let keys: Vec<u32> =
            ["a", "b", "c"].iter().map(|n| fabric.register(&arena(n)).unwrap().0 & 0xff).collect();
        assert_eq!(keys, [0, 1, 2]);
    }

    #[test]
    fn a_waker_ends_the_wait() {
        let mut cm = AnyCm::new(shm::Listener::new(ListenerParams::default()).unwrap());
        cm.waker().wake();
        assert!(cm.next_event(Some(Duration::from_secs(60))).unwrap().is_none());
    }

    #[test]
    fn listeners_are_numbered_over_all_fabrics() {
        let dir = std::env::temp_dir().join(format!("usurp-any-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut cm = AnyCm::new(shm::Listener::new(ListenerParams::default()).unwrap());
        #[cfg(feature = "verbs")]
        cm.listeners.push(Which::Verbs(0));
        #[cfg(not(feature = "verbs"))]
        cm.listeners.push(Which::Shm(9));
        assert_eq!(cm.listen_shm(&dir.join("a"), 0o600).unwrap(), 1);
        let gone = CmEvent::ListenerGone { listener: 0, why: String::new() };
        let renamed = cm.rename(gone, Which::Shm);
        assert!(matches!(renamed, CmEvent::ListenerGone { listener: 1, .. }));
        drop(cm);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
