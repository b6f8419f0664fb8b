//! Registration: memory that peers may write to, as long as its handle lives.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::engine::handle::MrHandle;
use crate::engine::running::{ANSWER, Engine, Group};
use crate::error::Error;
use crate::memory::mappings::Mappings;
use crate::memory::region::{Owner, Region, Terms};
use crate::providers::host;
use crate::providers::interface::{LocalKey, Registered, Registrar};
use crate::sys::once::Once;
use crate::wire::descriptor::{Device, GroupKeys, MrDesc, NetAddr, NicAddr, NicKey, ProviderKind};
use crate::worker::command::{Answer, Command, Part, Registration, Wanted};

/// Memory to be registered.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Its length in bytes.
    pub len: usize,
    /// Where it lies.
    pub device: Device,
    /// Nothing lands in it: peers read it, and this engine writes from it. The process need not be able to write to it.
    pub read_only: bool,
}

/// Does on this thread what takes long about a registration: the group's own has transfers to see to.
fn begun(group: &Group, region: &Arc<Region>) -> Result<Wanted, Error> {
    let begin = |registrar: &Option<Arc<dyn Registrar>>| match registrar {
        Some(registrar) => registrar.begin(region).map(Some),
        None => Ok(None),
    };
    let begun = group.registrars.iter().map(begin).collect::<Result<_, _>>()?;
    Ok(Wanted { region: Arc::clone(region), begun })
}

/// Checks that memory which nobody vouches for is there, and that what must not be written to is a source alone.
fn check_rights(regions: &[Region], device: Device) -> Result<(), Error> {
    if device != Device::Host {
        return match regions.iter().find(|region| region.is_read_only()) {
            Some(_) => {
                Err(Error::argument("read_only", format!("{device:?} memory came; host memory can be read-only")))
            }
            None => Ok(()),
        };
    }
    let guarded = || regions.iter().filter(|region| region.is_guarded());
    // Where the system does not say, the kernel still finds out before a byte lands.
    let Some(mappings) = guarded().next().and_then(|_| Mappings::read()) else { return Ok(()) };
    guarded().try_for_each(|region| mappings.check(region.address(), region.len(), region.is_read_only()))
}

/// Memory that its owner has promised to keep.
///
/// # Safety
/// As for [`Engine::reg_mr`].
unsafe fn promised(memory: &Memory) -> Result<Region, Error> {
    let terms = Terms { read_only: memory.read_only, guarded: true, whereabouts: None };
    // SAFETY: the caller promises what `borrowed` asks for.
    unsafe { Ok(Region::borrowed(memory.ptr as usize, memory.len, memory.device, None)?.on_terms(terms)) }
}

impl Engine {
    /// The device groups that move memory of a device.
    fn groups_for(&self, device: Device) -> Result<Vec<usize>, Error> {
        let groups = || self.inner.groups.iter().enumerate();
        let mut found: Vec<_> = groups().filter(|(_, group)| group.device == device).map(|(at, _)| at).collect();
        if device == Device::Host {
            // GPUs of one process share what is pinned: one group does it for all.
            found.extend(groups().find(|(_, group)| group.takes_host).map(|(at, _)| at));
        }
        if found.is_empty() {
            let known: Vec<_> = groups().map(|(_, group)| group.device).collect();
            let problem = format!("{device:?} came; this engine has groups for {known:?}");
            return Err(Error::argument("device", problem));
        }
        Ok(found)
    }

    /// Checks device groups that the caller has named.
    fn check_groups(&self, device: Device, named: &[usize]) -> Result<Vec<usize>, Error> {
        let fits = |index: &usize| {
            let group = self.inner.groups.get(*index);
            group.is_some_and(|group| group.device == device || group.takes_host && device == Device::Host)
        };
        let twice = named.iter().enumerate().any(|(at, index)| named.iter().skip(at + 1).any(|other| other == index));
        if named.is_empty() || twice || !named.iter().all(fits) {
            let problem = format!("{named:?} came; some that move memory of {device:?} are needed, each once");
            return Err(Error::argument("groups", problem));
        }
        Ok(named.to_vec())
    }

    /// Registers all of some regions with all of some device groups, or none.
    fn register_all(&self, regions: Vec<Region>, named: Option<&[usize]>) -> Result<Vec<(MrHandle, MrDesc)>, Error> {
        self.group(0)?;
        let Some(device) = regions.first().map(Region::device) else { return Ok(Vec::new()) };
        if let Some(other) = regions.iter().map(Region::device).find(|other| *other != device) {
            let problem = format!("{device:?} and {other:?} came; memory that is registered at once is of one device");
            return Err(Error::argument("device", problem));
        }
        let groups = named.map_or_else(|| self.groups_for(device), |named| self.check_groups(device, named))?;
        check_rights(&regions, device)?;
        let regions: Vec<_> = regions.into_iter().map(Arc::new).collect();
        let mut asked: Vec<(usize, Answer<Vec<Vec<Registered>>>)> = Vec::with_capacity(groups.len());
        for index in groups {
            let reply: Answer<Vec<Vec<Registered>>> = Arc::new(Once::default());
            let group = self.group(index)?;
            let wanted = regions.iter().map(|region| begun(group, region)).collect::<Result<_, _>>()?;
            let command = Command::Register { regions: wanted, reply: Arc::clone(&reply) };
            group.commands.push(command).map_err(|_| Error::Closed)?;
            asked.push((index, reply));
        }
        let (engine, home) = (self.inner.shared.engine, self.inner.home);
        let empty = |region: &Arc<Region>| Registration {
            region: Arc::clone(region),
            engine,
            parts: Vec::new(),
            lent: Mutex::default(),
            home,
        };
        let mut registrations: Vec<_> = regions.iter().map(empty).collect();
        let mut result = Ok(());
        for (index, reply) in asked {
            let late = Error::Timeout { what: "registering memory", after: ANSWER };
            match reply.wait(ANSWER).unwrap_or(Err(late)) {
                Ok(all) => {
                    let worker = Arc::downgrade(&self.group(index)?.commands);
                    for (registration, nics) in registrations.iter_mut().zip(all) {
                        registration.parts.push(Part { group: index, nics, worker: worker.clone() });
                    }
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        // The registrations of the other groups go with `registrations`.
        result?;
        Ok(registrations.into_iter().map(|registration| self.described(registration)).collect())
    }

    fn described(&self, registration: Registration) -> (MrHandle, MrDesc) {
        let desc = self.desc(&registration, &registration.parts);
        (MrHandle { registration: Arc::new(registration) }, desc)
    }

    /// The data that peers need to reach registered memory by these keys.
    fn desc(&self, registration: &Registration, parts: &[Part]) -> MrDesc {
        let nic = |(address, nic): (&NicAddr, &Registered)| NicKey {
            address: address.clone(),
            base: nic.base,
            rkey: nic.rkey,
        };
        let keys = |part: &Part| -> GroupKeys {
            let addresses = self.inner.groups.get(part.group).map_or(&[][..], |group| &group.addresses);
            addresses.iter().filter_map(|address| address.groups.first()).zip(&part.nics).map(nic).collect()
        };
        let (len, device) = (registration.region.len(), registration.region.device());
        MrDesc { len, device, groups: parts.iter().map(keys).collect() }
    }

    /// A descriptor of registered memory for one peer, with keys of its own: a fence of that peer, and the loss of its heartbeat, void
    /// them, and they stay void when it is admitted again. The plain descriptor and those of other peers go on. The memory is not
    /// pinned again over tcp, `host` and the simulated network; the other providers register it once more. A second call for the
    /// same peer returns the same keys, until they are void.
    ///
    /// # Errors
    /// [`Error::Argument`] for another engine's handle, or an address that this engine does not reach; whatever the provider reports.
    pub fn desc_for(&self, handle: &MrHandle, peer: &NetAddr) -> Result<MrDesc, Error> {
        self.check_local("handle", handle)?;
        self.check_peer(peer)?;
        let (registration, engine) = (&handle.registration, peer.key().engine);
        let lent = || registration.lent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(parts) = lent().get(&engine) {
            return Ok(self.desc(registration, parts));
        }
        let mut parts = Vec::with_capacity(registration.parts.len());
        for part in &registration.parts {
            let (group, reply) = (self.group(part.group)?, Arc::new(Once::default()));
            if !part.worker.ptr_eq(&Arc::downgrade(&group.commands)) {
                return Err(Error::argument("handle", "another engine's came; this engine's own is needed"));
            }
            let command = Command::Alias { region: Arc::clone(&registration.region), reply: Arc::clone(&reply) };
            group.commands.push(command).map_err(|_| Error::Closed)?;
            let late = Error::Timeout { what: "registering memory", after: ANSWER };
            let nics = reply.wait(ANSWER).unwrap_or(Err(late))?;
            parts.push(Part { group: part.group, nics, worker: part.worker.clone() });
        }
        let desc = self.desc(registration, &parts);
        let memory: Weak<Registration> = Arc::downgrade(registration);
        self.inner.shared.doors.lend(engine, memory);
        lent().insert(engine, parts);
        Ok(desc)
    }

    fn register(&self, region: Region, groups: Option<&[usize]>) -> Result<(MrHandle, MrDesc), Error> {
        let registered = self.register_all(vec![region], groups)?;
        registered.into_iter().next().ok_or(Error::Closed)
    }

    /// Registers memory that the caller owns.
    ///
    /// # Errors
    /// [`Error::Argument`] for a null pointer, a bad length, a device without a group, or host memory that the process cannot read and
    /// write; whatever the provider reports.
    ///
    /// # Safety
    /// The memory must stay valid for reads and writes (for reads, if it is read-only) until [`Engine::dereg_mr`] has returned, or the engine is closed; over
    /// libfabric, and where `dereg_mr` fails or a fence has said `may_land`, until the engine is closed. No Rust
    /// reference may point into it while transfers use it.
    pub unsafe fn reg_mr(&self, ptr: *mut u8, len: usize, device: Device) -> Result<(MrHandle, MrDesc), Error> {
        // SAFETY: the caller promises it.
        self.register(unsafe { promised(&Memory { ptr, len, device, read_only: false })? }, None)
    }

    /// Registers much memory of one device at once, with the device groups that are named, or with all that move memory of that
    /// device. Either all of it is registered or none.
    ///
    /// # Errors
    /// As for [`Engine::reg_mr`]; and [`Error::Argument`] for memory of several devices, or groups that do not move it.
    ///
    /// # Safety
    /// As for [`Engine::reg_mr`].
    pub unsafe fn reg_mrs(
        &self,
        memory: &[Memory],
        groups: Option<&[usize]>,
    ) -> Result<Vec<(MrHandle, MrDesc)>, Error> {
        // SAFETY: the caller promises it.
        let region = |one: &Memory| unsafe { promised(one) };
        self.register_all(memory.iter().map(region).collect::<Result<_, _>>()?, groups)
    }

    /// Registers much memory at once, as [`Engine::reg_mrs`] does: address and length, each kept by an owner until nothing uses the
    /// memory any more, and what is known of it.
    ///
    /// # Errors
    /// As for [`Engine::reg_mrs`].
    ///
    /// # Safety
    /// The memory must stay valid as long as its owner lives, as far as the terms go, and no Rust reference may point into it.
    pub unsafe fn reg_owned(
        &self,
        memory: Vec<(usize, usize, Owner, Terms)>,
        device: Device,
        groups: Option<&[usize]>,
    ) -> Result<Vec<(MrHandle, MrDesc)>, Error> {
        // SAFETY: the caller promises it.
        let region = |(address, len, owner, terms)| unsafe {
            Region::borrowed(address, len, device, owner).map(|region| region.on_terms(terms))
        };
        self.register_all(memory.into_iter().map(region).collect::<Result<_, _>>()?, groups)
    }

    /// Allocates zeroed host memory and registers it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a length of 0 or one that cannot be had; whatever the provider reports.
    pub fn alloc_mr(&self, len: usize) -> Result<(MrHandle, MrDesc), Error> {
        self.register(self.allocate(len)?, None)
    }

    /// Allocates zeroed host memory and registers it with these device groups alone.
    ///
    /// # Errors
    /// As for [`Engine::alloc_mr`]; and [`Error::Argument`] for groups that do not move host memory.
    pub fn alloc_mr_in(&self, len: usize, groups: &[usize]) -> Result<(MrHandle, MrDesc), Error> {
        self.register(self.allocate(len)?, Some(groups))
    }

    /// Memory of a kind that peers on this host can map, where the engine has a device group for them.
    fn allocate(&self, len: usize) -> Result<Region, Error> {
        if self.inner.groups.iter().any(|group| group.kind == ProviderKind::Host) {
            return host::allocate(len);
        }
        Region::allocate(len)
    }

    /// Ends a registration: when this returns, nothing lands in the memory any more, not even the rest of a write that is half
    /// done. libfabric cannot promise that (`tcp` can: it is not libfabric's): there the engine keeps the memory until it closes.
    /// Transfers of this engine that still read from it must be over.
    ///
    /// # Errors
    /// [`Error::Argument`] if other clones of the handle or transfers still use it, or another engine has registered it; then it stays
    /// registered.
    pub fn dereg_mr(&self, handle: MrHandle) -> Result<(), Error> {
        self.dereg_mrs(vec![handle])
    }

    /// Ends many registrations at once, as [`Engine::dereg_mr`] does one.
    ///
    /// # Errors
    /// As for that. If one of them is still in use, all of them stay.
    pub fn dereg_mrs(&self, handles: Vec<MrHandle>) -> Result<(), Error> {
        handles.iter().try_for_each(|handle| self.check_own("handle", handle.registration.engine))?;
        if handles.iter().any(|handle| Arc::strong_count(&handle.registration) > 1) {
            return Err(Error::argument("handle", "transfers or clones of the handle still use it"));
        }
        let mut keys: Vec<Vec<Vec<LocalKey>>> = self.inner.groups.iter().map(|_| Vec::new()).collect();
        // A handle that is cloned meanwhile keeps its memory registered; the others end with their values.
        let in_use = |_| Error::argument("handle", "transfers or clones of the handle still use it");
        let owned = handles.into_iter().map(|handle| Arc::try_unwrap(handle.registration).map_err(in_use));
        for mut registration in owned.collect::<Result<Vec<_>, _>>()? {
            let lent = std::mem::take(registration.lent.get_mut().unwrap_or_else(PoisonError::into_inner));
            for part in std::mem::take(&mut registration.parts).into_iter().chain(lent.into_values().flatten()) {
                if let Some(keys) = keys.get_mut(part.group) {
                    keys.push(part.keys());
                }
            }
        }
        let mut asked: Vec<Answer<()>> = Vec::new();
        for (index, keys) in keys.into_iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
            let reply: Answer<()> = Arc::new(Once::default());
            let command = Command::Deregister { keys, reply: Some(Arc::clone(&reply)) };
            // A closed engine has no registrations.
            if self.group(index).is_ok_and(|group| group.commands.push(command).is_ok()) {
                asked.push(reply);
            }
        }
        let late = || Error::Timeout { what: "deregistering memory", after: ANSWER };
        let mut result = Ok(());
        for reply in asked {
            // All of them, also after one has failed.
            result = result.and(reply.wait(ANSWER).unwrap_or_else(|| Err(late())));
        }
        result
    }
}
