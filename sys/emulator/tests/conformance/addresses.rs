//! Devices, ports, GIDs, and whom a queue pair can reach.

use std::time::{Duration, Instant};

use raccl_emulator::{DeviceSettings, Fault, Layout, Spec};
use raccl_sys::{Context, Error, Gid, GidEntry, Library, PortState, Route};

use crate::lab::*;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

fn with_device(settings: DeviceSettings) -> Spec {
    Spec { devices: vec![settings], ..two() }
}

#[test]
fn a_process_sees_the_devices_of_its_machine() {
    let spec = Layout::line().cables(2).spec(3);
    processes(&spec, |lab| {
        let devices = lab.library.devices().unwrap();
        let count = if lab.machine == 1 { 4 } else { 2 };
        let names: Vec<String> = (2..2 + count).map(|number| format!("rdma_en{number}")).collect();
        assert_eq!(devices.names(), names);
        let error = devices.find("rdma_en9").unwrap_err();
        assert!(error.to_string().contains("there are rdma_en2, rdma_en3"), "{error}");
    });
}

#[test]
fn without_a_description_there_are_no_devices() {
    // This process has none: only those that tests start do.
    if role().is_none() {
        let library = Library::load(Some(&library_file())).unwrap();
        let devices = library.devices().unwrap();
        assert!(devices.is_empty());
        let error = devices.find("rdma_en2").unwrap_err();
        assert!(error.to_string().contains("there is no RDMA device at all"), "{error}");
    }
}

#[test]
fn a_port_without_a_cable_is_down_and_has_no_domains() {
    let spec = with_device(DeviceSettings::plain(0, "rdma_en7"));
    one_process(&spec, |lab| refuses_domains(&lab.open("m0.rdma_en7")));
}

#[test]
fn a_port_that_is_switched_off_can_come_up_again() {
    let spec = with_device(DeviceSettings { port_down: true, ..DeviceSettings::plain(0, "rdma_en2") });
    one_process(&spec, |lab| {
        let context = lab.open("m0.rdma_en2");
        refuses_domains(&context);
        lab.emulation.inject(&Fault::PortUp { machine: 0, device: "rdma_en2".into() }).unwrap();
        context.active_port(1).unwrap();
        context.protection_domain().unwrap();
        lab.emulation.inject(&Fault::PortDown { machine: 0, device: "rdma_en2".into() }).unwrap();
        refuses_domains(&context);
    });
}

fn refuses_domains(context: &Context) {
    assert_eq!(context.port(1).unwrap().state(), PortState::Down);
    for error in [context.active_port(1).map(drop), context.protection_domain().map(drop)] {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::PortNotActive { .. }), "{error}");
        assert!(error.to_string().contains(context.name()), "{error}");
    }
    assert!(context.gids(1).unwrap().is_empty());
}

#[test]
fn a_device_has_one_port() {
    one_process(&two(), |lab| {
        let context = lab.open("m0.rdma_en2");
        assert_eq!(context.limits().unwrap().map(|limits| limits.ports), Some(1));
        assert_eq!(context.port(1).unwrap().active_mtu(), 4096);
        for port in [0, 2, 255] {
            let error = context.port(port).unwrap_err();
            assert!(error.to_string().contains("EINVAL"), "{error}");
        }
    });
}

#[test]
fn the_mapped_address_stands_between_the_link_local_ones() {
    one_process(&two(), |lab| {
        let gids = lab.open("m0.rdma_en2").gids(1).unwrap();
        let mapped: Vec<bool> = gids.iter().map(|entry| entry.gid.ipv4().is_some()).collect();
        assert_eq!(mapped, [false, true, false]);
        assert_eq!(gids[0].gid.0[..2], [0xfe, 0x80]);
        assert_eq!(gids[2].gid.0[..2], [0xfe, 0x80]);
        let other = lab.open("m1.rdma_en2").ipv4_gid(1).unwrap();
        assert_ne!(gids[1].gid, other.gid);
    });
}

#[test]
fn the_mapped_address_is_found_wherever_it_stands() {
    for index in [0, 1, 2, 5, 7] {
        let spec = with_device(DeviceSettings { gid_index: index, ..DeviceSettings::plain(0, "rdma_en2") });
        one_process(&spec, |lab| {
            let (a, b) = lab.wire(4);
            let expected = lab.emulation.spec().devices[0].gid_index;
            assert_eq!(a.bench.gid.index, expected);
            b.recv(1, 0, 8).unwrap();
            a.send(1, 0, 8).unwrap();
            b.wait_for(1);
        });
    }
}

#[test]
fn the_mapped_address_can_move_and_go() {
    one_process(&two(), |lab| {
        let context = lab.open("m0.rdma_en2");
        let gid = |index| Fault::Gid { machine: 0, device: "rdma_en2".into(), index };
        lab.emulation.inject(&gid(Some(4))).unwrap();
        assert_eq!(context.ipv4_gid(1).unwrap().index, 4);
        lab.emulation.inject(&gid(None)).unwrap();
        let error = context.ipv4_gid(1).unwrap_err();
        assert!(matches!(&error, Error::NoIpv4Gid { present, .. } if present.len() == 2), "{error}");
        assert!(error.to_string().contains("fe80:"), "{error}");
    });
}

#[test]
fn the_mapped_address_can_appear_late() {
    let after =
        |gid_after_ms| with_device(DeviceSettings { gid_after_ms, ..DeviceSettings::plain(0, "rdma_en2") });
    let an_hour = after(3_600_000);
    let soon = after(100);
    for spec in [an_hour, soon] {
        one_process(&spec, |lab| {
            let context = lab.open("m0.rdma_en2");
            if lab.emulation.spec().devices[0].gid_after_ms > 1000 {
                context.active_port(1).unwrap();
                assert!(matches!(context.ipv4_gid(1), Err(Error::NoIpv4Gid { .. })));
                return;
            }
            let deadline = Instant::now() + LONG;
            while context.ipv4_gid(1).is_err() {
                assert!(Instant::now() < deadline, "the address never came");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }
}

#[test]
fn a_bridged_port_is_active_but_has_no_mapped_address() {
    let spec = with_device(DeviceSettings { bridge: true, ..DeviceSettings::plain(0, "rdma_en2") });
    one_process(&spec, |lab| {
        let context = lab.open("m0.rdma_en2");
        context.active_port(1).unwrap();
        let error = context.ipv4_gid(1).unwrap_err();
        assert!(error.to_string().contains("bridge"), "{error}");
    });
}

/// Tries to connect a queue pair of the first machine of a mesh of three, after a change of the right way.
fn connecting(change: impl Fn(&Bench, &Bench, &Bench, &mut Route, &mut Gid)) -> Result<(), Error> {
    let lab = Lab::here();
    let a = lab.bench("m0.rdma_en2");
    let b = lab.bench("m1.rdma_en2");
    let c = lab.bench("m2.rdma_en2");
    let (pair, remote) = (a.pair(4), b.pair(4));
    let (mut route, mut peer) = (a.route(), b.peer(remote.number()));
    change(&a, &b, &c, &mut route, &mut peer.gid);
    pair.init(1)?.ready_to_receive(&route, &peer)?.ready_to_send(7)?;
    Ok(())
}

fn errno(result: Result<(), Error>) -> i32 {
    match result {
        Err(Error::Verb { verb: "ibv_modify_qp", errno, .. }) => errno.number(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_the_device_at_the_other_end_of_the_cable_is_reached() {
    one_process(&Layout::mesh().spec(3), |_| {
        connecting(|_, _, _, _, _| {}).unwrap();
        let elsewhere = connecting(|_, _, c, _, gid| *gid = c.gid.gid);
        assert_eq!(errno(elsewhere), 60, "a device of another cable");
        let oneself = connecting(|a, _, _, _, gid| *gid = a.gid.gid);
        assert_eq!(errno(oneself), 60, "loopback");
        let link_local = connecting(|_, b, _, _, gid| *gid = b.context.gid(1, 0).expect("it is there"));
        assert_eq!(errno(link_local), 60, "an address that is not IPv4-mapped");
        let nobody = connecting(|_, _, _, _, gid| *gid = Gid::default());
        assert_eq!(errno(nobody), 60, "no address");
    });
}

#[test]
fn the_own_address_has_to_be_the_mapped_one() {
    one_process(&Layout::mesh().spec(3), |lab| {
        for index in [0, 2, 3, 255] {
            assert_eq!(errno(connecting(|_, _, _, route, _| route.gid_index = index)), 22, "index {index}");
        }
        let moved = connecting(|_, _, _, _, _| {
            let index = Some(6);
            lab.emulation.inject(&Fault::Gid { machine: 0, device: "rdma_en2".into(), index }).unwrap();
        });
        assert_eq!(errno(moved), 22, "it was at 1 before");
    });
}

#[test]
fn a_peer_whose_port_is_down_is_not_reached() {
    one_process(&Layout::mesh().spec(3), |lab| {
        let down = connecting(|_, _, _, _, _| {
            lab.emulation.inject(&Fault::PortDown { machine: 1, device: "rdma_en2".into() }).unwrap();
        });
        assert_eq!(errno(down), 60);
    });
}

#[test]
fn every_mtu_of_the_interface_is_taken_and_no_other() {
    one_process(&Layout::mesh().spec(3), |_| {
        for mtu in [256, 512, 1024, 2048, 4096] {
            connecting(|_, _, _, route, _| route.mtu = mtu).unwrap();
        }
        let error = connecting(|_, _, _, route, _| route.mtu = 1500).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    });
}

#[test]
fn messages_to_a_queue_pair_that_is_not_there_never_complete() {
    one_process(&two(), |lab| {
        let (a, b) = lab.benches();
        let pair = a.pair(4);
        let peer = b.peer(pair.number() + 77);
        let port = a.connect(pair, &peer);
        port.send(1, 0, 8).unwrap();
        port.recv(2, 0, 8).unwrap();
        port.stays_silent();
    });
}

#[test]
fn a_queue_pair_hears_only_the_peer_it_is_connected_to() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(4);
        let stranger = lab.bench("m0.rdma_en2");
        let pair = stranger.pair(4);
        let peer = b.bench.peer(b.pair.number());
        let stranger = stranger.connect(pair, &peer);
        b.recv(1, 0, 64).unwrap();
        stranger.send(1, 0, 8).unwrap();
        stranger.stays_silent();
        b.stays_silent();
        a.send(2, 0, 9).unwrap();
        assert_eq!(b.wait_for(1).bytes(), 9);
    });
}

#[test]
fn entries_are_found_by_index() {
    one_process(&two(), |lab| {
        let context = lab.open("m0.rdma_en2");
        for GidEntry { index, gid } in context.gids(1).unwrap() {
            assert_eq!(context.gid(1, index).unwrap(), gid);
        }
        assert!(context.gid(1, 7).unwrap().is_zero());
        assert!(context.gid(1, 8).unwrap_err().to_string().contains("EINVAL"));
    });
}
