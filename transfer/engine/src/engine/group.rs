//! Device groups: a device, the NICs that serve it, and where their thread runs.

use std::fmt;

use crate::engine::topology::{Topology, cpus_near};
use crate::error::Error;
use crate::memory::gpu;
use crate::providers::host::HostNic;
use crate::providers::interface::{Nic, Opener, Openers};
use crate::providers::libfabric::FabricNic;
use crate::providers::nvlink::NvlinkNic;
use crate::providers::sim::SimNetwork;
use crate::providers::tcp::TcpNic;
use crate::providers::verbs::VerbsNic;
use crate::wire::descriptor::{Device, ProviderKind};

/// One device, the NICs that serve it, and where their worker thread runs.
pub struct DeviceGroup {
    pub(crate) nics: Openers,
    pub(crate) kind: ProviderKind,
    pub(crate) device: Device,
    pub(crate) cpus: Option<Vec<usize>>,
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nics, kind, device, cpus } = self;
        write!(f, "DeviceGroup({kind:?}, {device:?}, {} NICs, processors {cpus:?})", nics.len())
    }
}

impl DeviceGroup {
    /// Host memory behind some NICs of a simulated network.
    pub fn sim(network: &SimNetwork, nics: usize) -> Self {
        let open = |_| -> Opener {
            let network = network.clone();
            Box::new(move |_| Ok(Box::new(network.add_nic())))
        };
        Self {
            nics: Openers::Own((0..nics).map(open).collect()),
            kind: ProviderKind::Sim,
            device: Device::Host,
            cpus: None,
        }
    }

    /// Host memory of ranks of one host, over shared memory, as so many NICs. One is as fast as several.
    pub fn host(nics: usize) -> Self {
        let open = |_| -> Opener<dyn Nic + Send> { Box::new(|_| Ok(Box::new(HostNic::open()?))) };
        let nics = Openers::Movable((0..nics).map(open).collect());
        Self { nics, kind: ProviderKind::Host, device: Device::Host, cpus: None }
    }

    /// Host memory over TCP, between any machines. `sources` has one entry per NIC: an address of this machine, or a name that stands for
    /// one; None is the address that leads to other machines.
    pub fn tcp(sources: &[Option<&str>]) -> Self {
        let open = |source: &Option<&str>| -> Opener {
            let source = source.map(str::to_owned);
            Box::new(move |_| Ok(Box::new(TcpNic::open(source.as_deref())?)))
        };
        let nics = Openers::Own(sources.iter().map(open).collect());
        Self { nics, kind: ProviderKind::Tcp, device: Device::Host, cpus: None }
    }

    /// Host memory behind endpoints of a libfabric provider: "net" with the addresses of this machine's NICs, or "efa". `sources` has
    /// one entry per NIC; None leaves the choice to the provider. "tcp" is the same as [`DeviceGroup::tcp`], and "host" (libfabric's "shm") as
    /// [`DeviceGroup::host`] with as many NICs; both need no library. libfabric's own TCP has the name "tcp;ofi_rxm".
    ///
    /// The library is loaded by [`Builder::build`], which reports what is missing.
    pub fn libfabric(provider: &str, sources: &[Option<&str>]) -> Self {
        if matches!(provider, "host" | "shm") {
            return Self::host(sources.len());
        }
        if provider == "tcp" {
            return Self::tcp(sources);
        }
        let open = |source: &Option<&str>| -> Opener {
            let (provider, source) = (provider.to_owned(), source.map(str::to_owned));
            Box::new(move |device| Ok(Box::new(FabricNic::open(&provider, source.as_deref(), device)?)))
        };
        let nics = Openers::Own(sources.iter().map(open).collect());
        Self { nics, kind: ProviderKind::Libfabric, device: Device::Host, cpus: None }
    }

    /// A GPU and its peers in other processes of this machine, under its number in CUDA. It moves memory that comes from
    /// cudaMalloc, and host memory, which it pins.
    ///
    /// The driver is loaded by [`Builder::build`], which reports what is missing.
    pub fn nvlink(ordinal: u16) -> Self {
        let open: Opener = Box::new(move |_| Ok(Box::new(NvlinkNic::open(ordinal)?)));
        Self { nics: Openers::Own(vec![open]), kind: ProviderKind::Nvlink, device: Device::Cuda(ordinal), cpus: None }
    }

    /// Host memory behind ports of InfiniBand or RoCE NICs, as `device`, `device:port` or `device:port:gid_index`; the port is 1
    /// and the address the best RoCE v2 one (IPv4 first) unless said otherwise.
    ///
    /// libibverbs is loaded by [`Builder::build`], which reports what is missing.
    pub fn verbs(devices: &[&str]) -> Self {
        let open = |device: &&str| -> Opener {
            let device = (*device).to_owned();
            Box::new(move |_| Ok(Box::new(VerbsNic::open(&device)?)))
        };
        let nics = Openers::Own(devices.iter().map(open).collect());
        Self { nics, kind: ProviderKind::Verbs, device: Device::Host, cpus: None }
    }

    /// Memory of a device behind the NICs for verbs that are nearest to it, with its worker thread on the processors near them. A GPU
    /// is found by its number in CUDA; for the host's memory, the NICs of one NUMA node are taken.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without an active NIC for verbs, or without CUDA for a GPU; [`Error::Argument`] for a GPU that the topology
    /// does not have.
    pub fn verbs_near(topology: &Topology, device: Device) -> Result<Self, Error> {
        let (nics, cpus) = match device {
            Device::Host => {
                let nics = topology.host_nics()?;
                let cpus = nics.first().and_then(|nic| topology.cpus_near_nic(&nic.name));
                (nics, cpus)
            }
            Device::Cuda(ordinal) => {
                let pci = gpu::pci_address(ordinal)?;
                (topology.nics_near(&pci)?, topology.cpus_near_gpu(&pci))
            }
        };
        let names: Vec<_> = nics.iter().map(|nic| nic.name.as_str()).collect();
        let group = Self::verbs(&names).device(device);
        Ok(Self { cpus, ..group })
    }

    /// The device whose memory the group moves; the host unless said otherwise.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Pins the worker thread to these processors.
    pub fn cpus(mut self, cpus: Vec<usize>) -> Self {
        self.cpus = Some(cpus);
        self
    }

    /// Pins the worker thread near a network device (`eth0`, `mlx5_0`) or a PCI device (`0000:3b:00.0`), where the machine says what is
    /// near it.
    pub fn near(mut self, device: &str) -> Self {
        self.cpus = cpus_near(device);
        self
    }
}
