//! Which NICs and processors lie near a GPU or a NIC: Linux's sysfs says.

use std::path::{Component, Path, PathBuf};
use std::{fmt, fs};

use crate::error::Error;
use crate::wire::descriptor::MAX_NICS;

/// The numbers of a machine's GPUs on PCI: NVIDIA's number, and the first digits of the classes of displays.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// Reads a processor list as the kernel writes it, such as `0-3,8`. None if it is not one, or names nothing.
pub(crate) fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // The largest machines have some thousand processors; anything beyond is no list.
        if first > last || last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// The processors of the NUMA node of a network device (`eth0`), an InfiniBand device (`mlx5_0`) or a PCI device (`0000:3b:00.0`). None
/// where the machine does not say: virtual devices, one node only, another system.
pub fn cpus_near(device: &str) -> Option<Vec<usize>> {
    cpus_near_in(Path::new("/sys"), device)
}

fn cpus_near_in(sys: &Path, device: &str) -> Option<Vec<usize>> {
    if device.is_empty() || device.contains('/') || device.starts_with('.') {
        return None;
    }
    let class = |class: &str| sys.join("class").join(class).join(device).join("device/numa_node");
    let paths = [class("infiniband"), class("net"), sys.join("bus/pci/devices").join(device).join("numa_node")];
    let node: i64 = paths.iter().find_map(|path| fs::read_to_string(path).ok())?.trim().parse().ok()?;
    node_cpus(sys, u32::try_from(node).ok()?)
}

fn node_cpus(sys: &Path, node: u32) -> Option<Vec<usize>> {
    parse_cpu_list(&fs::read_to_string(sys.join(format!("devices/system/node/node{node}/cpulist"))).ok()?)
}

/// How near two devices are, from far to near.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proximity {
    /// In one machine.
    Machine,
    /// On one NUMA node.
    Node,
    /// Behind one root of PCI, so that what passes between them passes the processor's bridge.
    Root,
    /// Behind one PCI switch. The number says how many bridges both are behind: the more, the nearer.
    Switch(u8),
}

impl fmt::Display for Proximity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("machine"),
            Self::Node => f.write_str("node"),
            Self::Root => f.write_str("root"),
            Self::Switch(bridges) => write!(f, "switch, {bridges} bridges"),
        }
    }
}

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its address on PCI, such as `0000:3b:00.0`.
    pub pci: String,
    /// Its NUMA node, where the machine says so.
    pub node: Option<u32>,
    path: PathBuf,
}

/// A NIC of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Its name: `mlx5_0` for verbs, `eth0` for others.
    pub name: String,
    /// Whether verbs can use it.
    pub verbs: bool,
    /// Whether a cable is in it, and somebody at the other end.
    pub active: bool,
    /// Its NUMA node, where the machine says so.
    pub node: Option<u32>,
    path: PathBuf,
}

/// The GPUs and NICs of a machine. Devices that are not on PCI are left out.
#[derive(Debug, Clone)]
pub struct Topology {
    sys: PathBuf,
    gpus: Vec<Gpu>,
    nics: Vec<Nic>,
}

impl Topology {
    /// Reads this machine's.
    pub fn here() -> Self {
        Self::read(Path::new("/sys"))
    }

    /// Reads a machine's from a copy of its sysfs. What is missing there is missing here: it is no error.
    pub fn read(sys: &Path) -> Self {
        let gpus = entries(&sys.join("bus/pci/devices")).into_iter().filter_map(|(pci, path)| {
            let kind = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
            let is_gpu = kind("vendor").trim() == NVIDIA && kind("class").starts_with(DISPLAY);
            let path = is_gpu.then(|| path.canonicalize().ok()).flatten()?;
            Some(Gpu { pci, node: node_of(&path), path })
        });
        let nic = |verbs| {
            move |(name, path): (String, PathBuf)| {
                let device = path.join("device").canonicalize().ok()?;
                let active = if verbs { has_active_port(&path) } else { reads(&path.join("operstate"), "up") };
                Some(Nic { name, verbs, active, node: node_of(&device), path: device })
            }
        };
        let mut nics: Vec<_> = entries(&sys.join("class/infiniband")).into_iter().filter_map(nic(true)).collect();
        nics.extend(entries(&sys.join("class/net")).into_iter().filter_map(nic(false)));
        Self { sys: sys.to_owned(), gpus: gpus.collect(), nics }
    }

    /// The GPUs, in the order of their addresses.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The NICs: those for verbs first, each kind in the order of their names.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    fn gpu(&self, pci: &str) -> Result<&Gpu, Error> {
        let known = || self.gpus.iter().map(|gpu| gpu.pci.as_str()).collect::<Vec<_>>();
        let found = self.gpus.iter().find(|gpu| gpu.pci.eq_ignore_ascii_case(pci));
        found.ok_or_else(|| Error::argument("gpu", format!("{pci:?} came; this machine has {:?}", known())))
    }

    /// How near a NIC is to a GPU.
    pub fn proximity(&self, gpu: &Gpu, nic: &Nic) -> Proximity {
        let common = bridges(&gpu.path).zip(bridges(&nic.path)).take_while(|(one, other)| one == other).count();
        match common {
            0 if gpu.node.is_some() && gpu.node == nic.node => Proximity::Node,
            0 => Proximity::Machine,
            1 => Proximity::Root,
            more => Proximity::Switch(u8::try_from(more - 1).unwrap_or(u8::MAX)),
        }
    }

    /// The active NICs for verbs that are nearest to a GPU, by its address on PCI. GPUs that have the same NICs next to them share them
    /// out if there are enough. At most [`MAX_NICS`].
    ///
    /// # Errors
    /// [`Error::Argument`] for a GPU that this machine does not have; [`Error::Unavailable`] without an active NIC for verbs.
    pub fn nics_near(&self, gpu: &str) -> Result<Vec<&Nic>, Error> {
        let gpu = self.gpu(gpu)?;
        let nearest = self.nearest(gpu);
        if nearest.is_empty() {
            let why = "no NIC for verbs has an active port".into();
            return Err(Error::Unavailable { what: format!("a NIC near GPU {}", gpu.pci), why });
        }
        let rivals: Vec<_> = self.gpus.iter().filter(|other| self.nearest(other) == nearest).collect();
        let share = nearest.len() / rivals.len().max(1);
        let at = rivals.iter().position(|other| other.pci == gpu.pci).unwrap_or(0);
        let own = if share > 0 { nearest.get(at * share..(at + 1) * share) } else { nearest.get(at % nearest.len()..) };
        let most = if share > 0 { MAX_NICS } else { 1 };
        Ok(own.unwrap_or(&nearest).iter().copied().take(most).collect())
    }

    fn nearest(&self, gpu: &Gpu) -> Vec<&Nic> {
        let usable = || self.nics.iter().filter(|nic| nic.verbs && nic.active);
        let best = usable().map(|nic| self.proximity(gpu, nic)).max();
        usable().filter(|nic| Some(self.proximity(gpu, nic)) == best).collect()
    }

    /// The active NICs for verbs on one NUMA node, for memory of the host: those of the node that has most of them.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without an active NIC for verbs.
    pub fn host_nics(&self) -> Result<Vec<&Nic>, Error> {
        let usable = || self.nics.iter().filter(|nic| nic.verbs && nic.active);
        let on = |node| usable().filter(|nic| nic.node == node).count();
        // If several nodes have as many, the first.
        let best = usable().map(|nic| nic.node).reduce(|best, node| if on(node) > on(best) { node } else { best });
        let what = || "a NIC for verbs".into();
        let why = || "none has an active port".into();
        let node = best.ok_or_else(|| Error::Unavailable { what: what(), why: why() })?;
        Ok(usable().filter(|nic| nic.node == node).take(MAX_NICS).collect())
    }

    /// The processors near a GPU, by its address on PCI. None where the machine does not say.
    pub fn cpus_near_gpu(&self, gpu: &str) -> Option<Vec<usize>> {
        self.gpu(gpu).ok()?.node.and_then(|node| node_cpus(&self.sys, node))
    }

    /// The processors near a NIC, by its name. None where the machine does not say.
    pub fn cpus_near_nic(&self, nic: &str) -> Option<Vec<usize>> {
        self.nics.iter().find(|other| other.name == nic)?.node.and_then(|node| node_cpus(&self.sys, node))
    }
}

/// The names and paths in a folder, by name.
fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    let mut found: Vec<_> =
        fs::read_dir(folder).map_or_else(|_| Vec::new(), |all| all.flatten().filter_map(named).collect());
    // `mlx5_2` before `mlx5_10`.
    found.sort_by(|(one, _), (other, _)| (one.len(), one).cmp(&(other.len(), other)));
    found
}

fn reads(path: &Path, word: &str) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.trim() == word)
}

fn has_active_port(device: &Path) -> bool {
    entries(&device.join("ports")).iter().any(|(_, port)| reads(&port.join("state"), "4: ACTIVE"))
}

fn node_of(device: &Path) -> Option<u32> {
    fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
}

/// The bridges before a device on PCI, from the root on, without the device itself.
fn bridges(device: &Path) -> impl Iterator<Item = &std::ffi::OsStr> {
    let name = |component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    };
    let parts: Vec<_> = device.components().filter_map(name).collect();
    let is_root = |part: &&&std::ffi::OsStr| !part.to_string_lossy().starts_with("pci");
    let outside = parts.iter().take_while(is_root).count();
    let last = parts.len().saturating_sub(1);
    parts.into_iter().take(last).skip(outside)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_cpu_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_cpu_list("5"), Some(vec![5]));
        for wrong in ["", "3-1", "a", "1,", "0-99999999999", "0-9999999"] {
            assert_eq!(parse_cpu_list(wrong), None, "{wrong}");
        }
    }

    /// A copy of a machine's sysfs, as far as it matters here.
    struct Sys(PathBuf);

    impl Sys {
        fn new() -> Self {
            // Tests run at once in one process: each has a folder of its own.
            static FOLDERS: AtomicUsize = AtomicUsize::new(0);
            let (process, number) = (std::process::id(), FOLDERS.fetch_add(1, Ordering::Relaxed));
            let sys = std::env::temp_dir().join(format!("putget_transfer_sys_{process}_{number}"));
            let _ = fs::remove_dir_all(&sys);
            let sys = Self(sys);
            for (node, cpus) in [(0, "0-3"), (1, "4-7")] {
                sys.write(&format!("devices/system/node/node{node}/cpulist"), cpus);
            }
            sys
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn link(&self, from: &str, to: &str) {
            let from = self.0.join(from);
            fs::create_dir_all(from.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(self.0.join(to), from).unwrap();
        }

        fn device(&self, path: &str, node: i32) {
            self.write(&format!("{path}/numa_node"), &node.to_string());
        }

        fn gpu(&self, path: &str, node: i32) {
            self.device(path, node);
            self.write(&format!("{path}/vendor"), NVIDIA);
            self.write(&format!("{path}/class"), "0x030200");
            self.link(&format!("bus/pci/devices/{}", path.rsplit('/').next().unwrap()), path);
        }

        fn verbs(&self, name: &str, path: &str, node: i32, state: &str) {
            self.device(path, node);
            self.write(&format!("{path}/infiniband/{name}/ports/1/state"), state);
            self.link(&format!("{path}/infiniband/{name}/device"), path);
            self.link(&format!("class/infiniband/{name}"), &format!("{path}/infiniband/{name}"));
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const ACTIVE: &str = "4: ACTIVE";

    /// Two GPUs and three NICs behind one switch, of which one NIC is unplugged; a GPU with a NIC on its root; a GPU far from all.
    fn machine() -> Sys {
        let sys = Sys::new();
        sys.gpu("devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", 0);
        sys.gpu("devices/pci0000:00/0000:00:01.0/0000:01:01.0/0000:03:00.0", 0);
        sys.verbs("mlx5_2", "devices/pci0000:00/0000:00:01.0/0000:01:02.0/0000:04:00.0", 0, ACTIVE);
        sys.verbs("mlx5_10", "devices/pci0000:00/0000:00:01.0/0000:01:03.0/0000:05:00.0", 0, ACTIVE);
        sys.verbs("mlx5_1", "devices/pci0000:00/0000:00:01.0/0000:01:04.0/0000:06:00.0", 0, "1: DOWN");
        sys.gpu("devices/pci0000:40/0000:40:01.0/0000:41:00.0", 1);
        sys.verbs("mlx5_3", "devices/pci0000:40/0000:40:02.0/0000:42:00.0", 1, ACTIVE);
        sys.gpu("devices/pci0000:80/0000:80:01.0/0000:81:00.0", 1);
        sys
    }

    fn names<'a>(nics: impl IntoIterator<Item = &'a Nic>) -> Vec<&'a str> {
        nics.into_iter().map(|nic| nic.name.as_str()).collect()
    }

    #[test]
    fn the_nearest_nics_are_found_and_shared_out() {
        let sys = machine();
        let topology = Topology::read(&sys.0);
        assert_eq!(names(topology.nics()), ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_10"]);
        let pcis: Vec<_> = topology.gpus().iter().map(|gpu| gpu.pci.as_str()).collect();
        assert_eq!(pcis, ["0000:02:00.0", "0000:03:00.0", "0000:41:00.0", "0000:81:00.0"]);

        let near = |gpu| names(topology.nics_near(gpu).unwrap());
        assert_eq!(near("0000:02:00.0"), ["mlx5_2"]);
        assert_eq!(near("0000:03:00.0"), ["mlx5_10"]);
        assert_eq!(near("0000:41:00.0"), ["mlx5_3"]);
        // On another root of the same node.
        assert_eq!(near("0000:81:00.0"), ["mlx5_3"]);

        let proximity = |gpu: usize, nic: usize| topology.proximity(&topology.gpus()[gpu], &topology.nics()[nic]);
        assert_eq!(proximity(0, 1), Proximity::Switch(1));
        assert_eq!(proximity(2, 2), Proximity::Root);
        assert_eq!(proximity(3, 2), Proximity::Node);
        assert_eq!(proximity(0, 2), Proximity::Machine);
        assert!(Proximity::Switch(2) > Proximity::Switch(1) && Proximity::Switch(1) > Proximity::Root);

        assert_eq!(topology.cpus_near_gpu("0000:03:00.0"), Some(vec![0, 1, 2, 3]));
        assert_eq!(topology.cpus_near_nic("mlx5_3"), Some(vec![4, 5, 6, 7]));
        assert_eq!(names(topology.host_nics().unwrap()), ["mlx5_2", "mlx5_10"]);
        let refused = topology.nics_near("0000:99:00.0").unwrap_err().to_string();
        assert!(refused.contains("0000:99:00.0") && refused.contains("0000:02:00.0"), "{refused}");
    }

    #[test]
    fn fewer_nics_than_gpus_are_used_by_turns() {
        let sys = Sys::new();
        for gpu in 0..4 {
            sys.gpu(&format!("devices/pci0000:00/0000:00:01.0/0000:0{gpu}:00.0"), 0);
        }
        for nic in 0..2 {
            sys.verbs(&format!("mlx5_{nic}"), &format!("devices/pci0000:00/0000:00:01.0/0000:1{nic}:00.0"), 0, ACTIVE);
        }
        let topology = Topology::read(&sys.0);
        let near = |gpu: &Gpu| names(topology.nics_near(&gpu.pci).unwrap()).concat();
        let found: Vec<_> = topology.gpus().iter().map(near).collect();
        assert_eq!(found, ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]);
    }

    #[test]
    fn a_machine_without_any_is_no_error_until_one_is_needed() {
        let sys = Sys::new();
        sys.gpu("devices/pci0000:00/0000:00:01.0/0000:02:00.0", -1);
        let topology = Topology::read(&sys.0);
        assert!(matches!(topology.nics_near("0000:02:00.0"), Err(Error::Unavailable { .. })));
        assert!(matches!(topology.host_nics(), Err(Error::Unavailable { .. })));
        assert_eq!(topology.cpus_near_gpu("0000:02:00.0"), None);
        assert!(Topology::read(Path::new("/nowhere")).gpus().is_empty());
    }

    #[test]
    fn a_device_leads_to_its_node() {
        let sys = machine();
        let near = |device| cpus_near_in(&sys.0, device);
        assert_eq!(near("mlx5_3"), Some(vec![4, 5, 6, 7]));
        assert_eq!(near("0000:02:00.0"), Some(vec![0, 1, 2, 3]));
        assert_eq!((near("nic8"), near("../mlx5_3"), near("")), (None, None, None));
        sys.write("devices/pci0000:40/0000:40:02.0/0000:42:00.0/numa_node", "-1");
        assert_eq!(near("mlx5_3"), None);
    }
}
