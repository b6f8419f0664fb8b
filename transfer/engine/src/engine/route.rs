//! Which device group carries what goes to a peer: NVLink or shared memory inside a machine, the network between machines, and among
//! those the engine's first.

use std::fmt::Write;

use crate::engine::handle::MrHandle;
use crate::engine::running::{Engine, Group};
use crate::error::Error;
use crate::sys::place;
use crate::wire::descriptor::{Device, GroupKeys, MrDesc, NetAddr, NicAddr, ProviderKind, group_key};

/// How an operation travels, where the caller does not leave it to the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Via {
    /// The one device group of this engine to use, instead of the best one for each peer.
    pub device_group: Option<usize>,
    /// The one NIC of the device group to use, instead of all.
    pub nic: Option<usize>,
}

/// Groups with a smaller rank come first.
fn rank(provider: ProviderKind, between_gpus: bool) -> u8 {
    match provider {
        ProviderKind::Nvlink if between_gpus => 0,
        ProviderKind::Host => 1,
        // It carries host memory through a socket, which a GPU reads from there.
        ProviderKind::Nvlink => 2,
        ProviderKind::Sim | ProviderKind::Libfabric | ProviderKind::Verbs | ProviderKind::Tcp => 3,
    }
}

/// Says whether an address of this provider can be reached from here at all.
fn is_near(nic: &NicAddr) -> bool {
    match nic.provider {
        ProviderKind::Host | ProviderKind::Nvlink => place::is_here(&nic.endpoint),
        ProviderKind::Sim | ProviderKind::Libfabric | ProviderKind::Verbs | ProviderKind::Tcp => true,
    }
}

/// The best of some device groups of this engine, and that of the peer's which it reaches: the one with the same number where there is
/// one, because the NICs of both are likely to be on the same rail.
fn choose<T>(
    groups: impl Iterator<Item = (usize, ProviderKind)>,
    between_gpus: bool,
    theirs: &[T],
    fits: impl Fn(usize, &T) -> bool,
    number: impl Fn(&T) -> u16,
) -> Option<(usize, &T)> {
    let mut best: Option<(u8, usize, &T)> = None;
    for (group, provider) in groups {
        let rank = rank(provider, between_gpus);
        if best.is_some_and(|(found, ..)| found <= rank) {
            continue;
        }
        let mut fitting = theirs.iter().filter(|other| fits(group, other));
        let first = fitting.next();
        let same = first.into_iter().chain(fitting).find(|other| usize::from(number(other)) == group);
        if let Some(other) = same.or(first) {
            best = Some((rank, group, other));
        }
    }
    best.map(|(_, group, other)| (group, other))
}

impl Engine {
    /// Checks that a device group which the caller has named exists.
    fn check_device_group(&self, device_group: Option<usize>) -> Result<(), Error> {
        let groups = self.inner.groups.len();
        match device_group.filter(|index| *index >= groups) {
            Some(index) => {
                let problem = format!("{index} came; 0 to {} are allowed", groups - 1);
                Err(Error::argument("device_group", problem))
            }
            None => Ok(()),
        }
    }

    /// The device group that writes to a region, and the keys that it needs there. `src` is what it reads from, if it reads.
    pub(crate) fn route<'a>(
        &self,
        argument: &'static str,
        src: Option<&MrHandle>,
        dst: &'a MrDesc,
        device_group: Option<usize>,
    ) -> Result<(usize, &'a GroupKeys), Error> {
        let own = |index: usize| self.inner.groups.get(index);
        let fits = |index: usize, keys: &GroupKeys| {
            let first = keys.first().map(|nic| &nic.address);
            own(index).zip(first).is_some_and(|(group, first)| {
                group.kind == first.provider && group.addresses.len() == keys.len() && is_near(first)
            })
        };
        let between_gpus = dst.device != Device::Host || src.is_some_and(|src| src.device() != Device::Host);
        let allowed = |index: &usize| device_group.is_none_or(|named| named == *index);
        let with_kind = |index: usize| Some((index, own(index)?.kind));
        let number = |keys: &GroupKeys| group_key(keys).group;
        let found = match src {
            Some(src) => {
                let groups = src.groups().filter(allowed).filter_map(with_kind);
                choose(groups, between_gpus, &dst.groups, fits, number)
            }
            None => {
                let groups = (0..self.inner.groups.len()).filter(allowed).filter_map(with_kind);
                choose(groups, between_gpus, &dst.groups, fits, number)
            }
        };
        if let Some(found) = found {
            return Ok(found);
        }
        self.check_device_group(device_group)?;
        let theirs = dst.groups.iter().filter_map(|keys| Some((&keys.first()?.address, Some(keys.len()))));
        let usable = |index: &usize| allowed(index) && src.is_none_or(|src| src.groups().any(|group| group == *index));
        Err(self.not_shared(argument, theirs, usable))
    }

    /// The device group that carries all of what goes to one peer, or is read from it. `pairs` are own and the peer's regions.
    pub(crate) fn route_all(
        &self,
        argument: &'static str,
        pairs: &[(&MrHandle, &MrDesc)],
        reads: bool,
        device_group: Option<usize>,
    ) -> Result<usize, Error> {
        let carries = |index: usize| {
            self.check_reads(index, reads)?;
            pairs
                .iter()
                .try_for_each(|(local, remote)| self.route(argument, Some(local), remote, Some(index)).map(drop))
        };
        let mut first = None;
        for (local, remote) in pairs {
            let (index, _) = self.route(argument, Some(local), remote, device_group)?;
            if first != Some(index) && carries(index).is_ok() {
                return Ok(index);
            }
            first = first.or(Some(index));
        }
        let others = (0..self.inner.groups.len()).filter(|_| device_group.is_none());
        match (others.into_iter().find(|index| carries(*index).is_ok()), first) {
            (Some(index), _) => Ok(index),
            (None, Some(index)) => carries(index).map(|()| index),
            (None, None) => Ok(0),
        }
    }

    /// Checks that a device group can read, if it is to.
    fn check_reads(&self, index: usize, reads: bool) -> Result<(), Error> {
        match self.inner.groups.get(index).filter(|group| reads && !group.limits.reads) {
            Some(group) => {
                let what = format!("reading over {:?}", group.kind);
                Err(Error::Unavailable { what, why: "its provider offers no remote reads".into() })
            }
            None => Ok(()),
        }
    }

    /// The device group that reaches an address, and the NIC of the peer's that it takes.
    pub(crate) fn route_to<'a>(
        &self,
        argument: &'static str,
        address: &'a NetAddr,
        device_group: Option<usize>,
    ) -> Result<(usize, &'a NicAddr), Error> {
        let allowed = |index: &usize| device_group.is_none_or(|named| named == *index);
        let groups = self.inner.groups.iter().enumerate().map(|(index, group)| (index, group.kind));
        let groups = groups.filter(|(index, _)| allowed(index));
        let kind = |index: usize| self.inner.groups.get(index).map(|group| group.kind);
        let fits = |index: usize, nic: &NicAddr| kind(index) == Some(nic.provider) && is_near(nic);
        if let Some(found) = choose(groups, false, &address.groups, fits, |nic| nic.key.group) {
            return Ok(found);
        }
        self.check_device_group(device_group)?;
        Err(self.not_shared(argument, address.groups.iter().map(|nic| (nic, None)), allowed))
    }

    /// The value that came, and the ones that could have been used.
    fn not_shared<'a>(
        &self,
        argument: &'static str,
        theirs: impl Iterator<Item = (&'a NicAddr, Option<usize>)>,
        usable: impl Fn(&usize) -> bool,
    ) -> Error {
        let mut problem = String::from("device groups of ");
        let mut joined = "";
        for (nic, nics) in theirs {
            // Writing to a String does not fail.
            let _ = write!(problem, "{joined}{:?}", nic.provider);
            let _ = nics.map_or(Ok(()), |nics| write!(problem, " with {nics} NICs"));
            if !is_near(nic) {
                problem.push_str(" of another machine, user or network namespace");
            }
            joined = ", ";
        }
        problem.push_str(" came; this engine has");
        joined = " ";
        let group = |(index, group): (usize, &Group)| (index, group.kind, group.addresses.len());
        for (_, kind, nics) in self.inner.groups.iter().enumerate().map(group).filter(|(index, ..)| usable(index)) {
            let _ = write!(problem, "{joined}{kind:?} with {nics} NICs");
            joined = ", ";
        }
        if joined == " " {
            problem.push_str(" not registered the source for such a device group");
        }
        Error::argument(argument, problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceGroup;

    fn pick(groups: &[ProviderKind], between_gpus: bool, theirs: &[(ProviderKind, u16)]) -> Option<(usize, u16)> {
        let own = groups.iter().copied().enumerate();
        let fits = |index: usize, other: &(ProviderKind, u16)| groups[index] == other.0;
        choose(own, between_gpus, theirs, fits, |other| other.1).map(|(group, other)| (group, other.1))
    }

    #[test]
    fn inside_a_machine_before_the_network_and_the_first_network_before_others() {
        use ProviderKind::{Host, Nvlink, Tcp, Verbs};
        let all = [Tcp, Verbs, Host, Nvlink];
        let theirs = [(Tcp, 0), (Verbs, 1), (Host, 2), (Nvlink, 3)];
        assert_eq!(pick(&all, true, &theirs), Some((3, 3)));
        assert_eq!(pick(&all, false, &theirs), Some((2, 2)));
        assert_eq!(pick(&all, false, &theirs[..2]), Some((0, 0)));
        assert_eq!(pick(&[Verbs, Tcp], false, &theirs), Some((0, 1)));
        assert_eq!(pick(&[Verbs], false, &theirs[..1]), None);
        // The same number first, else the peer's first.
        assert_eq!(pick(&[Host, Tcp, Tcp], false, &[(Tcp, 1), (Tcp, 2)]), Some((1, 1)));
        assert_eq!(pick(&[Tcp], false, &[(Tcp, 1), (Tcp, 0)]), Some((0, 0)));
        assert_eq!(pick(&[Tcp], false, &[(Tcp, 5), (Tcp, 4)]), Some((0, 5)));
    }

    #[test]
    fn shared_memory_of_another_machine_is_no_way() -> Result<(), Error> {
        let both =
            || Engine::builder().group(DeviceGroup::host(1)).group(DeviceGroup::tcp(&[Some("127.0.0.1")])).build();
        let (a, b) = (both()?, both()?);
        let (source, _) = a.alloc_mr(64)?;
        let (_memory, desc) = b.alloc_mr(64)?;
        assert_eq!(a.route("dst", Some(&source), &desc, None)?.0, 0);
        assert_eq!(a.route_to("to", &b.main_address(), None)?.0, 0);

        let away = |mut nic: NicAddr| {
            if nic.provider == ProviderKind::Host {
                nic.endpoint[0] ^= 1;
            }
            nic
        };
        let mut far = desc.clone();
        let moved = |keys: &GroupKeys| {
            let key = |nic: &crate::wire::descriptor::NicKey| crate::wire::descriptor::NicKey {
                address: away(nic.address.clone()),
                ..nic.clone()
            };
            keys.iter().map(key).collect()
        };
        far.groups = desc.groups.iter().map(moved).collect();
        let address = NetAddr { groups: b.main_address().groups.iter().cloned().map(away).collect() };
        assert_eq!(a.route("dst", Some(&source), &far, None)?.0, 1);
        assert_eq!(a.route_to("to", &address, None)?.0, 1);
        let refused = a.route_to("to", &address, Some(0)).map(drop).unwrap_err().to_string();
        let expected = "device groups of Host of another machine, user or network namespace, Tcp came; this engine has Host with 1 NICs";
        assert!(refused.contains(expected), "{refused}");
        let refused = a.route("dst", None, &far, Some(2)).map(drop).unwrap_err().to_string();
        assert!(refused.contains("device_group: 2 came; 0 to 1 are allowed"), "{refused}");
        Ok(())
    }
}
