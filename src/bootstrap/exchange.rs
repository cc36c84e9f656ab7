//! Meeting through an all-gather of the user's instead of a coordinator.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::{
    Exchange, Met, Settings,
    address::{listen, own_addresses},
    advertised,
    door::Door,
    draw_nonce, failure, listen_on, mesh_deadline,
    message::{Card, Hello, Roster},
    report::difference,
};
use crate::{Cause, Result};

/// Gives this rank's card to everyone and makes the roster from everyone's cards.
pub(super) fn meet(
    settings: &Settings,
    mut own: Hello,
    exchange: Exchange,
    deadline: Instant,
) -> Result<Met> {
    let rank = settings.rank;
    let mut listeners = listen_on(settings)?;
    let named = listeners.len();
    if named == 0 {
        for ip in own_addresses() {
            if !ip.is_loopback() && !settings.allows_any_address() {
                continue;
            }
            match listen((ip, 0).into()) {
                Ok(listener) => listeners.push(listener),
                Err(error) => tracing::debug!(%ip, %error, "not listening there"),
            }
        }
    }
    own.member = advertised(settings, &listeners, named)?;
    let lead = match rank {
        0 => {
            let nonce =
                draw_nonce().map_err(|e| failure(0, "no random numbers from the system", Some(e.into())))?;
            Some((nonce, settings.blob.clone()))
        }
        _ => None,
    };
    let card = Card { hello: own, lead }.encode();
    let blobs = exchange(card).map_err(|error| {
        failure(rank, format!("the supplied exchange failed: {error}"), Some(error.into()))
    })?;
    let (members, (nonce, blob)) = read(settings, &blobs)?;
    let deadline = mesh_deadline(settings, deadline);
    let keys = settings.group_keys(&nonce);
    let roster = Roster { nonce, remaining: Duration::ZERO, blob, members };
    let door = Door::new(listeners, settings.size * (1 + settings.sockets), keys)
        .map_err(|error| failure(rank, "the listener cannot be used", Some(error.into())))?;
    let controls = (0..settings.size).map(|_| None).collect();
    Ok(Met::new(settings, roster, deadline, door, controls))
}

type Lead = ([u8; 32], Vec<u8>);

/// Checks the cards that came back. Every rank sees the same ones, so every rank comes to the same verdict.
fn read(settings: &Settings, blobs: &[Vec<u8>]) -> Result<(Vec<super::message::Member>, Lead)> {
    let Settings { rank, size, .. } = *settings;
    if blobs.len() != size {
        let reason = format!("the supplied exchange returned {} blobs in a group of {size}", blobs.len());
        return Err(failure(rank, reason, None));
    }
    let mut members = Vec::with_capacity(size);
    let mut first: Option<(Hello, Lead)> = None;
    for (from, blob) in blobs.iter().enumerate() {
        let Card { hello, lead } = Card::decode(blob).map_err(|malformed| {
            failure(
                rank,
                format!("the supplied exchange returned for rank {from} a {malformed}"),
                Some(Cause::new(malformed)),
            )
        })?;
        if hello.rank != from {
            let reason = format!(
                "the supplied exchange returned rank {}'s blob in rank {from}'s place; blobs go in rank order",
                hello.rank
            );
            return Err(failure(rank, reason, None));
        }
        members.push(hello.member.clone());
        match (&first, lead) {
            (None, Some(lead)) => first = Some((hello, lead)),
            (Some((zero, _)), None) => {
                if zero.job != hello.job {
                    let reason =
                        format!("rank 0 is of job {:?}, rank {from} of job {:?}", zero.job, hello.job);
                    return Err(failure(rank, reason, None));
                }
                if let Some(reason) = difference(zero, &hello) {
                    return Err(failure(rank, reason, None));
                }
            }
            (None, None) => return Err(failure(rank, "rank 0's blob does not lead the group", None)),
            (Some(_), Some(_)) => {
                return Err(failure(rank, format!("rank {from}'s blob leads the group like rank 0's"), None));
            }
        }
    }
    match first {
        Some((_, lead)) => Ok((members, lead)),
        None => Err(failure(rank, "the supplied exchange returned nothing", None)),
    }
}
