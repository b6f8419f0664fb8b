//! Registration: memory that peers may write to, as long as its handle lives.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::descriptor::{Device, MrDesc, NicKey, ProviderKind};
use crate::engine::{ANSWER, Engine};
use crate::error::Error;
use crate::handle::MrHandle;
use crate::host;
use crate::once::Once;
use crate::region::Region;
use crate::worker::command::{Answer, Command, Registration};

impl Engine {
    fn register(&self, region: Region) -> Result<(MrHandle, MrDesc), Error> {
        let device = region.device();
        let groups = &self.inner.groups;
        let found = groups.iter().position(|group| group.device == device);
        let found = found.or_else(|| groups.iter().position(|group| group.takes_host && device == Device::Host));
        let index = found.ok_or_else(|| {
            let known: Vec<_> = self.inner.groups.iter().map(|group| group.device).collect();
            Error::argument("device", format!("{device:?} came; this engine has groups for {known:?}"))
        })?;
        let group = self.group(index)?;
        let region = Arc::new(region);
        let reply: Answer<_> = Arc::new(Once::default());
        let command = Command::Register { region: Arc::clone(&region), reply: Arc::clone(&reply) };
        group.commands.push(command).map_err(|_| Error::Closed)?;
        let nics = reply.wait(ANSWER).ok_or(Error::Timeout { what: "registering memory", after: ANSWER })??;
        let keys = group.addresses.iter().zip(&nics);
        let keys = keys.map(|(address, nic)| NicKey { address: address.clone(), base: nic.base, rkey: nic.rkey });
        let descriptor = MrDesc { len: region.len(), device, nics: keys.collect() };
        let (worker, home) = (Arc::downgrade(&group.commands), self.inner.home);
        Ok((MrHandle { registration: Arc::new(Registration { region, group: index, nics, worker, home }) }, descriptor))
    }

    /// Registers memory that the caller owns.
    ///
    /// # Errors
    /// [`Error::Argument`] for a null pointer, a bad length or a device without a group; whatever the provider reports.
    ///
    /// # Safety
    /// The memory must stay valid for reads and writes until [`Engine::dereg_mr`] has returned, or the engine is closed; over
    /// libfabric, and where `dereg_mr` fails or a fence has said `may_land`, until the engine is closed. No Rust
    /// reference may point into it while transfers use it.
    pub unsafe fn reg_mr(&self, ptr: *mut u8, len: usize, device: Device) -> Result<(MrHandle, MrDesc), Error> {
        // SAFETY: the caller promises what `borrowed` asks for.
        self.register(unsafe { Region::borrowed(ptr as usize, len, device, None) }?)
    }

    /// Registers memory that lives as long as `owner`, which is kept until nothing uses the memory any more.
    ///
    /// # Safety
    /// The memory must stay valid for reads and writes as long as `owner` lives, and no Rust reference may point into it.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn reg_owned(
        &self,
        address: usize,
        len: usize,
        device: Device,
        owner: Box<dyn std::any::Any + Send + Sync>,
    ) -> Result<(MrHandle, MrDesc), Error> {
        // SAFETY: the caller promises what `borrowed` asks for.
        self.register(unsafe { Region::borrowed(address, len, device, Some(owner)) }?)
    }

    /// Allocates zeroed host memory and registers it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a length of 0 or one that cannot be had; whatever the provider reports.
    pub fn alloc_mr(&self, len: usize) -> Result<(MrHandle, MrDesc), Error> {
        let region = match self.inner.kind {
            ProviderKind::Host => host::allocate(len)?,
            _ => Region::allocate(len)?,
        };
        self.register(region)
    }

    /// Ends a registration: when this returns, nothing lands in the memory any more, not even the rest of a write that is half
    /// done. libfabric cannot promise that (`tcp` can: it is not libfabric's): there the engine keeps the memory until it closes.
    /// Transfers of this engine that still read from it must be over.
    ///
    /// # Errors
    /// [`Error::Argument`] if other clones of the handle or transfers still use it; then it stays registered.
    pub fn dereg_mr(&self, handle: MrHandle) -> Result<(), Error> {
        let mut registration = Arc::try_unwrap(handle.registration)
            .map_err(|_| Error::argument("handle", "transfers or clones of the handle still use it"))?;
        let keys = std::mem::take(&mut registration.nics).iter().map(|nic| nic.local).collect();
        let reply: Answer<()> = Arc::new(Once::default());
        let command = Command::Deregister { keys, reply: Some(Arc::clone(&reply)) };
        if self
            .group(registration.group)
            .and_then(|group| group.commands.push(command).map_err(|_| Error::Closed))
            .is_err()
        {
            // A closed engine has no registrations.
            return Ok(());
        }
        reply.wait(ANSWER).ok_or(Error::Timeout { what: "deregistering memory", after: ANSWER })?
    }
}
