//! librdmacm as far as we use it: structs, constants and functions of `rdma/rdma_cma.h`.
//!
//! Nothing here does anything; [`super::rdmacm`] gives the raw pointers their owners. The layouts
//! are those of the x86-64 and aarch64 C ABI; the test at the foot compares them with the system's
//! header. libibverbs' own structs come from `ibverbs-sys`.

#![allow(non_camel_case_types)]

use ibverbs_sys::{ibv_context, ibv_cq, ibv_pd, ibv_qp, ibv_qp_attr, ibv_srq};
use libc::{c_int, c_void, sockaddr, sockaddr_storage};

/// `RDMA_PS_TCP`: reliable connections.
pub(super) const RDMA_PS_TCP: c_int = 0x0106;

/// Option level `RDMA_OPTION_ID`.
pub(super) const OPTION_ID: c_int = 0;
/// Option `RDMA_OPTION_ID_AFONLY` of that level: an IPv6 address does not take IPv4.
pub(super) const OPTION_ID_AFONLY: c_int = 2;

/// What `rdma_cm_event::event` says.
pub(super) mod event {
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_ERROR: u32 = 6;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
    pub(crate) const ADDR_CHANGE: u32 = 14;
    pub(crate) const TIMEWAIT_EXIT: u32 = 15;
}

/// Address pair of an identifier.
#[repr(C)]
pub(super) struct rdma_addr {
    pub(super) src: sockaddr_storage,
    pub(super) dst: sockaddr_storage,
    /// `struct rdma_ib_addr`: two GIDs and a P_Key.
    pub(super) ib: [u64; 5],
}

#[repr(C)]
pub(super) struct rdma_route {
    pub(super) addr: rdma_addr,
    pub(super) path_rec: *mut c_void,
    pub(super) num_paths: c_int,
}

#[repr(C)]
pub(super) struct rdma_event_channel {
    pub(super) fd: c_int,
}

#[repr(C)]
pub(super) struct rdma_cm_id {
    pub(super) verbs: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut ibv_qp,
    pub(super) route: rdma_route,
    pub(super) ps: c_int,
    pub(super) port_num: u8,
    pub(super) event: *mut rdma_cm_event,
    pub(super) send_cq_channel: *mut c_void,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq_channel: *mut c_void,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) pd: *mut ibv_pd,
    pub(super) qp_type: c_int,
}

#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct rdma_conn_param {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// The event; `param` is a union whose other member (datagrams) is longer.
#[repr(C)]
pub(super) struct rdma_cm_event {
    pub(super) id: *mut rdma_cm_id,
    pub(super) listen_id: *mut rdma_cm_id,
    pub(super) event: u32,
    pub(super) status: c_int,
    pub(super) conn: rdma_conn_param,
}

#[link(name = "rdmacm")]
unsafe extern "C" {
    pub(super) fn rdma_create_event_channel() -> *mut rdma_event_channel;
    pub(super) fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    pub(super) fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: c_int,
    ) -> c_int;
    pub(super) fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    pub(super) fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
    pub(super) fn rdma_set_option(
        id: *mut rdma_cm_id,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: usize,
    ) -> c_int;
    pub(super) fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    pub(super) fn rdma_get_cm_event(
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> c_int;
    pub(super) fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
    pub(super) fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int;
    pub(super) fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int;
    pub(super) fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
    pub(super) fn rdma_notify(id: *mut rdma_cm_id, event: c_int) -> c_int;
    pub(super) fn rdma_init_qp_attr(
        id: *mut rdma_cm_id,
        attr: *mut ibv_qp_attr,
        mask: *mut c_int,
    ) -> c_int;
    pub(super) fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};
    use std::process::Command;

    /// Our idea of a struct: its name, and "field offset" lines; field "" is the whole size.
    fn ours() -> Vec<(&'static str, &'static str, usize)> {
        macro_rules! of {
            ($name:ident: $($field:ident as $c:literal),*) => {
                vec![(concat!("struct ", stringify!($name)), "", size_of::<$name>()),
                    $((concat!("struct ", stringify!($name)), $c, offset_of!($name, $field)),)*]
            };
        }
        let mut all = of!(rdma_addr: src as "src_addr", dst as "dst_addr", ib as "addr");
        all.extend(of!(rdma_route: addr as "addr", path_rec as "path_rec",
            num_paths as "num_paths"));
        all.extend(of!(rdma_event_channel: fd as "fd"));
        all.extend(of!(rdma_cm_id: verbs as "verbs", channel as "channel", context as "context",
            qp as "qp", route as "route", ps as "ps", port_num as "port_num", event as "event",
            send_cq_channel as "send_cq_channel", send_cq as "send_cq",
            recv_cq_channel as "recv_cq_channel", recv_cq as "recv_cq", srq as "srq", pd as "pd",
            qp_type as "qp_type"));
        all.extend(of!(rdma_conn_param: private_data as "private_data",
            private_data_len as "private_data_len", responder_resources as "responder_resources",
            initiator_depth as "initiator_depth", flow_control as "flow_control",
            retry_count as "retry_count", rnr_retry_count as "rnr_retry_count", srq as "srq",
            qp_num as "qp_num"));
        let event = "struct rdma_cm_event";
        all.extend([
            (event, "id", offset_of!(rdma_cm_event, id)),
            (event, "listen_id", offset_of!(rdma_cm_event, listen_id)),
            (event, "event", offset_of!(rdma_cm_event, event)),
            (event, "status", offset_of!(rdma_cm_event, status)),
            (event, "param.conn", offset_of!(rdma_cm_event, conn)),
        ]);
        // ibverbs-sys was generated from another rdma-core: what we touch must be the system's.
        use ibverbs_sys as v;
        all.extend([
            ("struct ibv_send_wr", "", size_of::<v::ibv_send_wr>()),
            ("struct ibv_send_wr", "opcode", offset_of!(v::ibv_send_wr, opcode)),
            ("struct ibv_send_wr", "send_flags", offset_of!(v::ibv_send_wr, send_flags)),
            ("struct ibv_send_wr", "wr.rdma", offset_of!(v::ibv_send_wr, wr)),
            ("struct ibv_recv_wr", "", size_of::<v::ibv_recv_wr>()),
            ("struct ibv_sge", "", size_of::<v::ibv_sge>()),
            ("struct ibv_wc", "", size_of::<v::ibv_wc>()),
            ("struct ibv_context", "ops.poll_cq", {
                offset_of!(v::ibv_context, ops) + offset_of!(v::ibv_context_ops, poll_cq)
            }),
            ("struct ibv_context", "ops.post_send", {
                offset_of!(v::ibv_context, ops) + offset_of!(v::ibv_context_ops, post_send)
            }),
            ("struct ibv_context", "ops.post_recv", {
                offset_of!(v::ibv_context, ops) + offset_of!(v::ibv_context_ops, post_recv)
            }),
            ("struct ibv_context", "async_fd", offset_of!(v::ibv_context, async_fd)),
            ("struct ibv_device", "transport_type", offset_of!(v::ibv_device, transport_type)),
            ("struct ibv_device", "name", offset_of!(v::ibv_device, name)),
            ("struct ibv_qp", "qp_num", offset_of!(v::ibv_qp, qp_num)),
            ("struct ibv_qp", "qp_context", offset_of!(v::ibv_qp, qp_context)),
            ("struct ibv_mr", "lkey", offset_of!(v::ibv_mr, lkey)),
            ("struct ibv_qp_attr", "timeout", offset_of!(v::ibv_qp_attr, timeout)),
            ("struct ibv_qp_init_attr", "", size_of::<v::ibv_qp_init_attr>()),
            ("struct ibv_device_attr", "max_cqe", offset_of!(v::ibv_device_attr, max_cqe)),
            ("struct ibv_async_event", "", size_of::<v::ibv_async_event>()),
        ]);
        all
    }

    #[test]
    fn layouts_are_those_of_the_system_headers() {
        let ours = ours();
        let mut source = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\n\
             int main(void)\n{\n",
        );
        for (name, field, _) in &ours {
            let expr = match *field {
                "" => format!("sizeof({name})"),
                field => format!("offsetof({name}, {field})"),
            };
            source.push_str(&format!("\tprintf(\"%zu\\n\", (size_t){expr});\n"));
        }
        let constants = [
            ("RDMA_CM_EVENT_CONNECT_REQUEST", event::CONNECT_REQUEST),
            ("RDMA_CM_EVENT_CONNECT_ERROR", event::CONNECT_ERROR),
            ("RDMA_CM_EVENT_UNREACHABLE", event::UNREACHABLE),
            ("RDMA_CM_EVENT_REJECTED", event::REJECTED),
            ("RDMA_CM_EVENT_ESTABLISHED", event::ESTABLISHED),
            ("RDMA_CM_EVENT_DISCONNECTED", event::DISCONNECTED),
            ("RDMA_CM_EVENT_DEVICE_REMOVAL", event::DEVICE_REMOVAL),
            ("RDMA_CM_EVENT_ADDR_CHANGE", event::ADDR_CHANGE),
            ("RDMA_CM_EVENT_TIMEWAIT_EXIT", event::TIMEWAIT_EXIT),
            ("RDMA_PS_TCP", RDMA_PS_TCP as u32),
            ("RDMA_OPTION_ID", OPTION_ID as u32),
            ("RDMA_OPTION_ID_AFONLY", OPTION_ID_AFONLY as u32),
        ];
        for (name, _) in &constants {
            source.push_str(&format!("\tprintf(\"%zu\\n\", (size_t){name});\n"));
        }
        source.push_str("\treturn 0;\n}\n");
        let dir = std::env::temp_dir().join(format!("usurp-layout-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (c, exe) = (dir.join("layout.c"), dir.join("layout"));
        std::fs::write(&c, source).unwrap();
        let header = std::path::Path::new("/usr/include/rdma/rdma_cma.h");
        let compiled = Command::new("cc").arg("-o").arg(&exe).arg(&c).status();
        if !header.exists() || compiled.is_err() {
            let _ = std::fs::remove_dir_all(&dir);
            return println!("skipped, because there is no librdmacm-dev or no C compiler");
        }
        assert!(compiled.unwrap().success(), "the layout program does not compile");
        let output = Command::new(&exe).output().unwrap();
        let _ = std::fs::remove_dir_all(&dir);
        let text = String::from_utf8(output.stdout).unwrap();
        let theirs: Vec<usize> = text.lines().map(|l| l.parse().unwrap()).collect();
        let values = ours.iter().map(|(n, f, v)| (format!("{n}.{f}"), *v));
        let named = constants.iter().map(|(n, v)| ((*n).to_owned(), *v as usize));
        let all: Vec<_> = values.chain(named).collect();
        assert_eq!(all.len(), theirs.len());
        for ((name, ours), theirs) in all.iter().zip(&theirs) {
            assert_eq!(ours, theirs, "{name}");
        }
    }
}
