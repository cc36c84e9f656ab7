//! The C functions themselves: what they refuse, and what programs in C rely on that raccl-sys does not use.

use std::ffi::{CString, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;

use raccl_emulator::{Layout, Spec};
use raccl_sys::abi::*;

use crate::lab::*;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

const MEMORY: usize = 1 << 20;

/// The exported functions, found as a C program finds them.
struct Functions(*mut c_void);

impl Functions {
    fn load() -> Functions {
        let path = CString::new(library_file().as_os_str().as_bytes()).unwrap();
        // SAFETY: loads the library that is under test, which is never unloaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Functions(handle)
    }

    fn find(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is of a library that is loaded.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?} is exported");
        address
    }
}

/// Calls an exported function by the name of its type.
macro_rules! call {
    ($functions:expr, $name:ident ( $($argument:expr),* $(,)? )) => {{
        let address = $functions.find(concat!("ibv_", stringify!($name)));
        // SAFETY: the exported function has the type of its name.
        let function = unsafe { std::mem::transmute::<*mut c_void, $name>(address) };
        // SAFETY: tests pass objects that are alive and structures that are theirs.
        unsafe { function($($argument),*) }
    }};
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Objects of one device, made by C functions.
struct Objects {
    functions: Functions,
    list: *mut *mut ibv_device,
    context: *mut ibv_context,
    domain: *mut ibv_pd,
    queue: *mut ibv_cq,
    region: *mut ibv_mr,
    memory: *mut u8,
    pair: *mut ibv_qp,
}

fn zeroed<T>() -> T {
    // SAFETY: only used for structures of integers and pointers, for which zero bytes are a value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

impl Objects {
    fn of(device: usize) -> Objects {
        let functions = Functions::load();
        let list = call!(functions, get_device_list(null_mut()));
        assert!(!list.is_null());
        // SAFETY: the emulation has more than `device` devices.
        let place = unsafe { list.add(device) };
        // SAFETY: as above.
        let device = unsafe { *place };
        let context = call!(functions, open_device(device));
        let domain = call!(functions, alloc_pd(context));
        let queue = call!(functions, create_cq(context, 64, null_mut(), null_mut(), 0));
        let layout = std::alloc::Layout::from_size_align(MEMORY, 16 << 10).unwrap();
        // SAFETY: the size is not 0.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        let region = call!(functions, reg_mr(domain, memory.cast(), MEMORY, 1));
        assert!(!region.is_null(), "errno {}", errno());
        let mut objects =
            Objects { functions, list, context, domain, queue, region, memory, pair: null_mut() };
        objects.pair = objects.make(&mut objects.init());
        assert!(!objects.pair.is_null(), "errno {}", errno());
        objects
    }

    fn init(&self) -> ibv_qp_init_attr {
        let mut init: ibv_qp_init_attr = zeroed();
        init.send_cq = self.queue;
        init.recv_cq = self.queue;
        init.cap.max_send_wr = 8;
        init.cap.max_recv_wr = 8;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init.qp_type = IBV_QPT_UC;
        init
    }

    fn make(&self, init: &mut ibv_qp_init_attr) -> *mut ibv_qp {
        call!(self.functions, create_qp(self.domain, init))
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.pair).qp_num }
    }

    fn modify(
        &self,
        state: ibv_qp_state,
        mask: ibv_qp_attr_mask,
        change: impl FnOnce(&mut ibv_qp_attr),
    ) -> i32 {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        attributes.port_num = 1;
        change(&mut attributes);
        call!(self.functions, modify_qp(self.pair, &mut attributes, mask as i32))
    }

    fn to_init(&self) -> i32 {
        self.modify(
            IBV_QPS_INIT,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            |_| {},
        )
    }

    fn to_receive(&self, peer: &Objects) -> i32 {
        let mut gid = ibv_gid { raw: [0; 16] };
        assert_eq!(call!(self.functions, query_gid(peer.context, 1, 1, &mut gid)), 0);
        self.modify(
            IBV_QPS_RTR,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
            |attributes| {
                attributes.path_mtu = IBV_MTU_1024;
                attributes.dest_qp_num = peer.number();
                attributes.ah_attr.is_global = 1;
                attributes.ah_attr.port_num = 1;
                attributes.ah_attr.grh.sgid_index = 1;
                attributes.ah_attr.grh.dgid = gid;
            },
        )
    }

    fn to_send(&self) -> i32 {
        self.modify(IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN, |_| {})
    }

    fn piece(&self, offset: usize, length: u32) -> ibv_sge {
        // SAFETY: the region is alive.
        let lkey = unsafe { (*self.region).lkey };
        ibv_sge { addr: (self.memory.addr() + offset) as u64, length, lkey }
    }

    /// Posts a send after a change, and returns the status.
    fn send(&self, piece: &mut ibv_sge, change: impl FnOnce(&mut ibv_send_wr)) -> i32 {
        let mut request: ibv_send_wr = zeroed();
        request.sg_list = piece;
        request.num_sge = 1;
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_SIGNALED;
        change(&mut request);
        let mut bad = null_mut();
        // SAFETY: the context is open.
        let post = unsafe { (*self.context).ops.post_send }.unwrap();
        // SAFETY: the queue pair is alive, and the memory stays.
        unsafe { post(self.pair, &mut request, &mut bad) }
    }

    fn recv(&self, piece: &mut ibv_sge, change: impl FnOnce(&mut ibv_recv_wr)) -> i32 {
        let mut request: ibv_recv_wr = zeroed();
        request.sg_list = piece;
        request.num_sge = 1;
        change(&mut request);
        let mut bad = null_mut();
        // SAFETY: the context is open.
        let post = unsafe { (*self.context).ops.post_recv }.unwrap();
        // SAFETY: the queue pair is alive, and the memory stays.
        unsafe { post(self.pair, &mut request, &mut bad) }
    }

    fn poll(&self) -> Vec<ibv_wc> {
        let mut done: [ibv_wc; 16] = zeroed();
        // SAFETY: the context is open.
        let poll = unsafe { (*self.context).ops.poll_cq }.unwrap();
        // SAFETY: the queue is alive, and there is room for 16.
        let count = unsafe { poll(self.queue, 16, done.as_mut_ptr()) };
        done[..usize::try_from(count).unwrap()].to_vec()
    }

    /// Frees in the driver's order; what fails, with its number.
    fn free(self) -> Vec<(&'static str, i32)> {
        let functions = &self.functions;
        let statuses = [
            ("ibv_destroy_qp", call!(functions, destroy_qp(self.pair))),
            ("ibv_dereg_mr", call!(functions, dereg_mr(self.region))),
            ("ibv_destroy_cq", call!(functions, destroy_cq(self.queue))),
            ("ibv_dealloc_pd", call!(functions, dealloc_pd(self.domain))),
            ("ibv_close_device", call!(functions, close_device(self.context))),
        ];
        call!(functions, free_device_list(self.list));
        statuses.into_iter().filter(|(_, status)| *status != 0).collect()
    }
}

fn connected() -> (Objects, Objects) {
    let (a, b) = (Objects::of(0), Objects::of(1));
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!((one.to_init(), one.to_receive(other), one.to_send()), (0, 0, 0));
    }
    (a, b)
}

#[test]
fn operations_are_where_the_header_has_them() {
    one_process(&two(), |_| {
        let objects = Objects::of(0);
        let base: *const usize = objects.context.cast();
        let at = |offset: usize| {
            // SAFETY: the context is open and longer than these offsets.
            let place = unsafe { base.byte_add(offset) };
            // SAFETY: as above.
            unsafe { place.read() }
        };
        // SAFETY: as above.
        let ops = unsafe { (*objects.context).ops };
        assert_eq!(at(96), ops.poll_cq.unwrap() as usize);
        assert_eq!(at(208), ops.post_send.unwrap() as usize);
        assert_eq!(at(216), ops.post_recv.unwrap() as usize);
        assert_eq!(at(320), 0, "no extensions are announced");
        assert_eq!(objects.free(), []);
    });
}

#[test]
fn objects_begin_with_the_fields_that_programs_read() {
    one_process(&two(), |_| {
        let objects = Objects::of(0);
        // SAFETY: the queue pair is alive.
        let pair = unsafe { &*objects.pair };
        // SAFETY: the region is alive.
        let region = unsafe { &*objects.region };
        assert_eq!((pair.context, pair.pd, pair.send_cq), (objects.context, objects.domain, objects.queue));
        assert_eq!((pair.qp_type, pair.state), (IBV_QPT_UC, IBV_QPS_RESET));
        assert!(pair.qp_num > 1 && pair.qp_num < 1 << 24);
        assert_eq!((region.context, region.pd), (objects.context, objects.domain));
        assert_eq!((region.addr.cast(), region.length), (objects.memory, MEMORY));
        assert_eq!(region.rkey, 0, "there is no remote access");
        // SAFETY: the queue is alive.
        assert_eq!(unsafe { (*objects.queue).context }, objects.context);
        assert_eq!(offset_of!(ibv_pd, context), 0);
        // SAFETY: the domain is alive.
        assert_eq!(unsafe { (*objects.domain).context }, objects.context);
        assert_eq!(objects.free(), []);
    });
}

#[test]
fn work_is_rejected_before_the_pair_is_ready_to_send() {
    one_process(&two(), |_| {
        let (a, b) = (Objects::of(0), Objects::of(1));
        let mut piece = a.piece(0, 8);
        let mut rejects = |when: &str| {
            assert_eq!(a.recv(&mut piece, |_| {}), 22, "receive {when}");
            assert_eq!(a.send(&mut piece, |_| {}), 22, "send {when}");
        };
        rejects("in reset");
        assert_eq!(a.to_init(), 0);
        rejects("in init");
        assert_eq!(a.to_receive(&b), 0);
        rejects("when ready to receive");
        assert_eq!(a.to_send(), 0);
        assert_eq!(a.recv(&mut a.piece(0, 8), |_| {}), 0);
    });
}

#[test]
fn states_follow_one_another_with_exactly_their_attributes() {
    one_process(&two(), |_| {
        let (a, b) = (Objects::of(0), Objects::of(1));
        assert_eq!(a.to_receive(&b), 22, "reset goes to init");
        assert_eq!(a.to_send(), 22);
        assert_eq!(a.modify(IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PORT, |_| {}), 22, "attributes are missing");
        let all = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(a.modify(IBV_QPS_INIT, all | IBV_QP_QKEY, |_| {}), 22, "one too many");
        assert_eq!(a.modify(IBV_QPS_INIT, all, |attributes| attributes.port_num = 2), 22, "port 2");
        assert_eq!(a.to_init(), 0);
        assert_eq!(a.to_init(), 22, "once is enough");
        let reliable = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MIN_RNR_TIMER
            | IBV_QP_MAX_DEST_RD_ATOMIC;
        assert_eq!(a.modify(IBV_QPS_RTR, reliable, |_| {}), 22, "those are of reliable connections");
        assert_eq!(a.to_receive(&b), 0);
        assert_eq!(a.to_send(), 0);
        // SAFETY: the queue pair is alive.
        assert_eq!(unsafe { (*a.pair).state }, IBV_QPS_RTS);
        let (mut attributes, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
        assert_eq!(call!(a.functions, query_qp(a.pair, &mut attributes, 1, &mut init)), 0);
        assert_eq!((attributes.qp_state, init.qp_type), (IBV_QPS_RTS, IBV_QPT_UC));
    });
}

#[test]
fn only_plain_sends_of_one_piece_are_taken() {
    one_process(&two(), |_| {
        let (a, _b) = connected();
        let mut pieces = [a.piece(0, 8), a.piece(64, 8)];
        for opcode in [0, 1, 3, 4, 5, 6] {
            assert_eq!(a.send(&mut pieces[0], |request| request.opcode = opcode), 22, "opcode {opcode}");
        }
        for flags in [1, 4, 8, 16] {
            assert_eq!(a.send(&mut pieces[0], |request| request.send_flags |= flags), 22, "flags {flags}");
        }
        for count in [0, 2] {
            assert_eq!(a.send(&mut pieces[0], |request| request.num_sge = count), 22, "{count} pieces");
            assert_eq!(a.recv(&mut pieces[0], |request| request.num_sge = count), 22, "{count} pieces");
        }
        assert_eq!(a.send(&mut pieces[0], |_| {}), 0);
    });
}

#[test]
fn queue_pairs_of_other_kinds_are_refused() {
    one_process(&two(), |_| {
        let a = Objects::of(0);
        let refused = |change: fn(&mut ibv_qp_init_attr)| {
            let mut init = a.init();
            change(&mut init);
            assert!(a.make(&mut init).is_null());
            errno()
        };
        assert_eq!(refused(|init| init.qp_type = IBV_QPT_RC), 102);
        assert_eq!(refused(|init| init.qp_type = IBV_QPT_UD), 102);
        assert_eq!(refused(|init| init.srq = std::ptr::dangling_mut()), 102);
        assert_eq!(refused(|init| init.cap.max_send_sge = 2), 22);
        assert_eq!(refused(|init| init.cap.max_recv_sge = 2), 22);
        assert_eq!(refused(|init| init.cap.max_inline_data = 1), 22);
        let channel = std::ptr::dangling_mut();
        assert!(call!(a.functions, create_cq(a.context, 8, null_mut(), channel, 0)).is_null());
        assert_eq!(errno(), 102);
    });
}

#[test]
fn a_list_is_posted_up_to_the_request_that_fails() {
    one_process(&two(), |_| {
        let (a, b) = connected();
        let mut pieces = [a.piece(0, 8), a.piece(64, 8), a.piece(128, 8)];
        let mut requests: [ibv_send_wr; 3] = zeroed();
        for (index, (request, piece)) in requests.iter_mut().zip(&mut pieces).enumerate() {
            request.wr_id = index as u64;
            request.sg_list = piece;
            request.num_sge = 1;
            request.opcode = IBV_WR_SEND;
            request.send_flags = IBV_SEND_SIGNALED;
        }
        requests[2].opcode = IBV_WR_RDMA_WRITE;
        requests[1].next = &raw mut requests[2];
        requests[0].next = &raw mut requests[1];
        let mut bad = null_mut();
        // SAFETY: the context is open.
        let post = unsafe { (*a.context).ops.post_send }.unwrap();
        // SAFETY: the queue pair is alive, and list and memory stay.
        assert_eq!(unsafe { post(a.pair, &raw mut requests[0], &mut bad) }, 22);
        assert_eq!(bad, &raw mut requests[2]);
        let mut receives = [b.piece(0, 8), b.piece(64, 8)];
        let mut lists: [ibv_recv_wr; 2] = zeroed();
        for (request, piece) in lists.iter_mut().zip(&mut receives) {
            request.sg_list = piece;
            request.num_sge = 1;
        }
        lists[0].next = &raw mut lists[1];
        let mut bad = null_mut();
        // SAFETY: the context is open.
        let post = unsafe { (*b.context).ops.post_recv }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { post(b.pair, &raw mut lists[0], &mut bad) }, 0);
        assert_eq!(b.poll().len(), 2);
        assert_eq!(a.poll().iter().map(|done| done.wr_id).collect::<Vec<_>>(), [0, 1]);
    });
}

#[test]
fn sends_without_a_signal_complete_in_silence_and_free_their_slots() {
    one_process(&two(), |_| {
        let (a, b) = connected();
        for id in 0..50 {
            assert_eq!(b.recv(&mut b.piece(0, 8), |_| {}), 0);
            let signaled = id % 5 == 4;
            let status = a.send(&mut a.piece(0, 8), |request| {
                request.wr_id = id;
                request.send_flags = if signaled { IBV_SEND_SIGNALED } else { 0 };
            });
            assert_eq!(status, 0);
            let ids: Vec<u64> = a.poll().iter().map(|done| done.wr_id).collect();
            assert_eq!(ids, if signaled { vec![id] } else { vec![] });
            assert_eq!(b.poll().len(), 1);
        }
    });
}

#[test]
fn completions_say_what_was_done() {
    one_process(&two(), |_| {
        let (a, b) = connected();
        assert_eq!(b.recv(&mut b.piece(0, 100), |request| request.wr_id = 5), 0);
        assert_eq!(a.send(&mut a.piece(0, 33), |request| request.wr_id = 6), 0);
        let (received, sent) = (b.poll()[0], a.poll()[0]);
        assert_eq!((received.wr_id, received.opcode, received.byte_len), (5, IBV_WC_RECV, 33));
        assert_eq!((received.qp_num, received.wc_flags), (b.number(), 0));
        assert_eq!((sent.wr_id, sent.opcode, sent.qp_num), (6, IBV_WC_SEND, a.number()));
    });
}

#[test]
fn moving_to_the_error_state_flushes_work_and_spoils_deregistration() {
    one_process(&two(), |lab| {
        let (a, _b) = connected();
        assert_eq!(a.recv(&mut a.piece(0, 8), |_| {}), 0);
        assert_eq!(a.send(&mut a.piece(0, 8), |_| {}), 0);
        assert_eq!(a.modify(IBV_QPS_ERR, IBV_QP_STATE, |_| {}), 0);
        let statuses: Vec<u32> = a.poll().iter().map(|done| done.status).collect();
        assert_eq!(statuses, [IBV_WC_WR_FLUSH_ERR; 2]);
        let failed: Vec<_> = a.free().into_iter().map(|(verb, _)| verb).collect();
        assert_eq!(failed, ["ibv_dereg_mr", "ibv_dealloc_pd", "ibv_close_device"]);
        assert_eq!(lab.emulation.books_of(0, "rdma_en2").unwrap().live.regions, 1);
    });
}

#[test]
fn what_is_in_use_cannot_be_freed() {
    one_process(&two(), |_| {
        let a = Objects::of(0);
        assert_eq!(call!(a.functions, destroy_cq(a.queue)), 16);
        assert_eq!(call!(a.functions, dealloc_pd(a.domain)), 16);
        assert_eq!(call!(a.functions, close_device(a.context)), 16);
        assert_eq!(a.free(), []);
    });
}

#[test]
fn freeing_in_another_order_is_counted() {
    one_process(&two(), |lab| {
        let mistakes = || lab.emulation.books().mistakes.freed_out_of_order;
        let a = Objects::of(0);
        assert_eq!(call!(a.functions, destroy_qp(a.pair)), 0);
        assert_eq!(call!(a.functions, destroy_cq(a.queue)), 0);
        assert_eq!(mistakes(), 1, "the region was to go before the queue");
        assert_eq!(call!(a.functions, dereg_mr(a.region)), 0);
        let queue = call!(a.functions, create_cq(a.context, 8, null_mut(), null_mut(), 0));
        assert_eq!(call!(a.functions, dealloc_pd(a.domain)), 0);
        assert_eq!(mistakes(), 2, "the queue was to go before the domain");
        assert_eq!(call!(a.functions, destroy_cq(queue)), 0);
        assert_eq!(call!(a.functions, close_device(a.context)), 0);
        assert!(lab.emulation.books().live.is_zero());
    });
}
