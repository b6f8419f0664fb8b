//! Which of a port's addresses to use: Linux's sysfs says what they are.

use std::fs;
use std::path::Path;

use crate::error::Error;

/// A port's address: its place in the port's table, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gid {
    pub index: u8,
    pub bytes: [u8; 16],
    /// RoCE, not InfiniBand.
    pub ethernet: bool,
}

/// Reads a GID as the kernel writes it: eight groups of four hexadecimal digits.
fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut groups = text.trim().split(':');
    for pair in bytes.chunks_exact_mut(2) {
        let group = groups.next().filter(|group| group.len() == 4)?;
        pair.copy_from_slice(&u16::from_str_radix(group, 16).ok()?.to_be_bytes());
    }
    groups.next().is_none().then_some(bytes)
}

/// How much a RoCE v2 address is wanted; smaller is more. IPv4 first: it is routed wherever the host's IPv4 is. Addresses of
/// one link come last.
fn rank(gid: &[u8; 16]) -> u8 {
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    if gid.starts_with(&mapped) {
        0
    } else if gid.starts_with(&[0xfe, 0x80]) {
        2
    } else {
        1
    }
}

/// Chooses the address of a port: the one at `index` if it is given, else the best RoCE v2 address, or InfiniBand's first.
///
/// # Errors
/// [`Error::Unavailable`] where there is none.
pub(super) fn choose(sys: &Path, device: &str, port: u8, index: Option<u8>) -> Result<Gid, Error> {
    let folder = sys.join("class/infiniband").join(device).join("ports").join(port.to_string());
    let missing =
        |why: &str| Error::Unavailable { what: format!("verbs device {device}, port {port}"), why: why.into() };
    let layer = fs::read_to_string(folder.join("link_layer")).map_err(|_| missing("it has no such port"))?;
    let ethernet = layer.trim() == "Ethernet";
    let read = |index: u8| {
        let text = fs::read_to_string(folder.join(format!("gids/{index}"))).ok()?;
        parse_gid(&text).filter(|gid| *gid != [0; 16])
    };
    let is_v2 = |index: u8| {
        fs::read_to_string(folder.join(format!("gid_attrs/types/{index}"))).is_ok_and(|kind| kind.trim() == "RoCE v2")
    };
    let found = match index {
        Some(index) => read(index).map(|bytes| (index, bytes)),
        None if !ethernet => read(0).map(|bytes| (0, bytes)),
        None => {
            let all = (0..=u8::MAX).filter(|index| is_v2(*index));
            all.filter_map(|index| Some((index, read(index)?))).min_by_key(|(index, gid)| (rank(gid), *index))
        }
    };
    let why = match index {
        Some(index) => format!("its table has no address at {index}"),
        None if ethernet => {
            "it has no RoCE v2 address; its network interface needs an IP address and must be up".into()
        }
        None => "it has no address".into(),
    };
    let (index, bytes) = found.ok_or_else(|| missing(&why))?;
    Ok(Gid { index, bytes, ethernet })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, layer: &str, gids: &[(&str, &str)]) -> std::path::PathBuf {
        let sys = std::env::temp_dir().join(format!("putget_transfer_gid_{name}_{}", std::process::id()));
        let folder = sys.join("class/infiniband/nic/ports/1");
        fs::create_dir_all(folder.join("gids")).unwrap();
        fs::create_dir_all(folder.join("gid_attrs/types")).unwrap();
        fs::write(folder.join("link_layer"), format!("{layer}\n")).unwrap();
        for (index, (gid, kind)) in gids.iter().enumerate() {
            fs::write(folder.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
            fs::write(folder.join(format!("gid_attrs/types/{index}")), format!("{kind}\n")).unwrap();
        }
        sys
    }

    const LINK: &str = "fe80:0000:0000:0000:0000:00ff:fe00:0001";
    const FOUR: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
    const SIX: &str = "fd00:0000:0000:0000:0000:0000:0000:0001";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn the_best_address_is_chosen() {
        type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], Option<u8>, Option<u8>);
        let cases: [Case<'_>; 7] = [
            ("four", "Ethernet", &[(LINK, "RoCE v2"), (FOUR, "IB/RoCE v1"), (FOUR, "RoCE v2")], None, Some(2)),
            ("six", "Ethernet", &[(LINK, "RoCE v2"), (SIX, "RoCE v2"), (NONE, "RoCE v2")], None, Some(1)),
            ("link", "Ethernet", &[(LINK, "IB/RoCE v1"), (LINK, "RoCE v2")], None, Some(1)),
            ("old", "Ethernet", &[(FOUR, "IB/RoCE v1")], None, None),
            ("told", "Ethernet", &[(FOUR, "IB/RoCE v1"), (FOUR, "RoCE v2")], Some(0), Some(0)),
            ("gone", "Ethernet", &[(FOUR, "RoCE v2")], Some(1), None),
            ("band", "InfiniBand", &[(LINK, "IB/RoCE v1")], None, Some(0)),
        ];
        for (name, layer, gids, told, right) in cases {
            let sys = port(name, layer, gids);
            let found = choose(&sys, "nic", 1, told);
            fs::remove_dir_all(&sys).unwrap();
            assert_eq!(found.as_ref().ok().map(|gid| gid.index), right, "{name}: {found:?}");
            assert!(found.is_ok_and(|gid| gid.ethernet == (layer == "Ethernet")) || right.is_none());
        }
        assert!(choose(Path::new("/nowhere"), "nic", 1, None).is_err());
    }

    #[test]
    fn what_is_no_address_is_none() {
        let mut right = [0; 16];
        right[10..].copy_from_slice(&[0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(parse_gid(FOUR), Some(right));
        for wrong in ["", "fe80", &FOUR[5..], &format!("{FOUR}:0000"), "g000:0000:0000:0000:0000:ffff:0a4d:0001"] {
            assert_eq!(parse_gid(wrong), None, "{wrong}");
        }
    }
}
