//! The declared structures and constants against the numbers of Apple's header, and against a program in C.
//!
//! The numbers are written out here once more on purpose: the declarations come from Linux's header, and this is
//! what holds them to be the other system's too.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use raccl_sys::abi::*;

/// One number of the interface.
struct Number {
    /// The expression in C.
    c: String,
    /// What Rust has.
    rust: usize,
    /// What Apple has.
    apple: usize,
}

/// Structures as `name size { field offset ... }`, the field spelled as in C, with the field in Rust where it is
/// called something else. A size of `_` is not compared: only the first fields are declared.
macro_rules! structures {
    ($($name:ident $size:tt { $($field:ident $offset:literal $(=> $rust:ident)?),* $(,)? })*) => {{
        let mut numbers = Vec::new();
        $(
            structures!(@size numbers $name $size);
            $(numbers.push(Number {
                c: format!("offsetof(struct {}, {})", stringify!($name), stringify!($field)),
                rust: structures!(@offset $name $field $($rust)?),
                apple: $offset,
            });)*
        )*
        numbers
    }};
    (@size $numbers:ident $name:ident _) => {};
    (@size $numbers:ident $name:ident $size:literal) => {
        $numbers.push(Number {
            c: format!("sizeof(struct {})", stringify!($name)),
            rust: size_of::<$name>(),
            apple: $size,
        });
    };
    (@offset $name:ident $field:ident) => { offset_of!($name, $field) };
    (@offset $name:ident $field:ident $rust:ident) => { offset_of!($name, $rust) };
}

fn structures() -> Vec<Number> {
    let mut numbers = structures! {
        ibv_qp_cap 20 {
            max_send_wr 0, max_recv_wr 4, max_send_sge 8, max_recv_sge 12, max_inline_data 16,
        }
        ibv_qp_init_attr 64 {
            qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56,
        }
        ibv_global_route 24 { dgid 0, flow_label 16, sgid_index 20, hop_limit 21, traffic_class 22 }
        ibv_ah_attr 32 {
            grh 0, dlid 24, sl 26, src_path_bits 27, static_rate 28, is_global 29, port_num 30,
        }
        ibv_qp_attr 144 {
            qp_state 0, cur_qp_state 4, path_mtu 8, path_mig_state 12, qkey 16, rq_psn 20, sq_psn 24,
            dest_qp_num 28, qp_access_flags 32, cap 36, ah_attr 56, alt_ah_attr 88, pkey_index 120,
            min_rnr_timer 128, port_num 129, timeout 130, rate_limit 136,
        }
        ibv_sge 16 { addr 0, length 8, lkey 12 }
        ibv_send_wr 128 {
            wr_id 0, next 8, sg_list 16, num_sge 24, opcode 28, send_flags 32, imm_data 36 => __bindgen_anon_1, wr 40,
        }
        ibv_recv_wr 32 { wr_id 0, next 8, sg_list 16, num_sge 24 }
        ibv_wc 48 {
            wr_id 0, status 8, opcode 12, vendor_err 16, byte_len 20, imm_data 24 => __bindgen_anon_1, qp_num 28,
            src_qp 32, wc_flags 36,
        }
        ibv_port_attr 52 {
            state 0, max_mtu 4, active_mtu 8, gid_tbl_len 12, port_cap_flags 16, max_msg_sz 20, lid 34,
            link_layer 46, flags 47,
        }
        ibv_mr 48 { context 0, pd 8, addr 16, length 24, handle 32, lkey 36, rkey 40 }
        ibv_qp _ {
            context 0, qp_context 8, pd 16, send_cq 24, recv_cq 32, srq 40, handle 48, qp_num 52, state 56,
            qp_type 60,
        }
        ibv_cq _ { context 0, channel 8 }
        ibv_context _ { device 0, ops 8 }
        ibv_device_attr 232 {
            max_mr_size 80, max_qp 108, max_qp_wr 112, max_sge 120, max_cq 128, max_cqe 132, max_mr 136,
            max_pd 140, phys_port_cnt 227,
        }
    };
    let ops = offset_of!(ibv_context, ops);
    for (c, rust, apple) in [
        ("sizeof(union ibv_gid)", size_of::<ibv_gid>(), 16),
        ("offsetof(union ibv_gid, raw)", offset_of!(ibv_gid, raw), 0),
        ("offsetof(struct ibv_context, ops.poll_cq)", ops + offset_of!(ibv_context_ops, poll_cq), 96),
        ("offsetof(struct ibv_context, ops.post_send)", ops + offset_of!(ibv_context_ops, post_send), 208),
        ("offsetof(struct ibv_context, ops.post_recv)", ops + offset_of!(ibv_context_ops, post_recv), 216),
    ] {
        numbers.push(Number { c: c.into(), rust, apple });
    }
    numbers
}

fn constants() -> Vec<Number> {
    macro_rules! constants {
        ($($name:ident $value:literal),* $(,)?) => {
            vec![$(Number { c: stringify!($name).into(), rust: $name as usize, apple: $value }),*]
        };
    }
    constants! {
        IBV_QPT_RC 2, IBV_QPT_UC 3, IBV_WR_SEND 2, IBV_QPS_RESET 0, IBV_QPS_INIT 1, IBV_QPS_RTR 2, IBV_QPS_RTS 3,
        IBV_QPS_ERR 6, IBV_ACCESS_LOCAL_WRITE 1, IBV_ACCESS_REMOTE_WRITE 2, IBV_ACCESS_REMOTE_READ 4,
        IBV_QP_STATE 1, IBV_QP_ACCESS_FLAGS 8, IBV_QP_PKEY_INDEX 16, IBV_QP_PORT 32, IBV_QP_AV 128,
        IBV_QP_PATH_MTU 256, IBV_QP_RQ_PSN 4096, IBV_QP_SQ_PSN 65536, IBV_QP_DEST_QPN 1048576,
        IBV_SEND_SIGNALED 2, IBV_MTU_1024 3, IBV_MTU_4096 5, IBV_PORT_ACTIVE 4,
    }
}

#[test]
fn declarations_have_apples_numbers() {
    for Number { c, rust, apple } in structures().into_iter().chain(constants()) {
        // A newer header may have added a field at the end of this one, for which callers leave room.
        if c == "sizeof(struct ibv_port_attr)" && rust == 56 {
            continue;
        }
        assert_eq!(rust, apple, "{c}");
    }
}

#[test]
#[ignore = "needs infiniband/verbs.h: `ci/bindings --check` finds it and runs this"]
fn declarations_have_the_numbers_of_a_c_program() {
    let include = std::env::var("RACCL_VERBS_INCLUDE").unwrap_or_else(|_| "/usr/include".into());
    let numbers: Vec<_> = structures().into_iter().chain(constants()).collect();
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    for Number { c, .. } in &numbers {
        writeln!(source, "printf(\"%zu\\n\", (size_t)({c}));").unwrap();
    }
    source.push_str("return 0; }\n");

    let folder = std::env::temp_dir().join(format!("raccl-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (file, program) = (folder.join("probe.c"), folder.join("probe"));
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built =
        Command::new(&compiler).arg("-I").arg(&include).arg("-o").arg(&program).arg(&file).output().unwrap();
    assert!(built.status.success(), "{compiler}: {}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success());

    let text = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<usize> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(answers.len(), numbers.len());
    for (Number { c, rust, .. }, answer) in numbers.iter().zip(answers) {
        assert_eq!(*rust, answer, "{c}");
    }
}
