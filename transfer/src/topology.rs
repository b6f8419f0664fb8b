//! Which processors lie near a NIC: Linux's sysfs says.

use std::fs;
use std::path::Path;

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

/// The processors of the NUMA node of a network device (`eth0`) or an InfiniBand device (`mlx5_0`). None where the machine
/// does not say: virtual devices, one node only, another system.
pub fn cpus_near(device: &str) -> Option<Vec<usize>> {
    cpus_near_in(Path::new("/sys"), device)
}

fn cpus_near_in(sys: &Path, device: &str) -> Option<Vec<usize>> {
    if device.is_empty() || device.contains('/') || device.starts_with('.') {
        return None;
    }
    let classes = ["class/infiniband", "class/net"].map(|class| sys.join(class).join(device).join("device/numa_node"));
    let node: i64 = classes.iter().find_map(|path| fs::read_to_string(path).ok())?.trim().parse().ok()?;
    let node = u32::try_from(node).ok()?;
    parse_cpu_list(&fs::read_to_string(sys.join(format!("devices/system/node/node{node}/cpulist"))).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_cpu_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_cpu_list("5"), Some(vec![5]));
        for wrong in ["", "3-1", "a", "1,", "0-99999999999", "0-9999999"] {
            assert_eq!(parse_cpu_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_nic_leads_to_its_node() -> std::io::Result<()> {
        let sys = std::env::temp_dir().join(format!("putget_transfer_sys_{}", std::process::id()));
        let device = sys.join("class/infiniband/nic7/device");
        let node = sys.join("devices/system/node/node1");
        fs::create_dir_all(&device)?;
        fs::create_dir_all(&node)?;
        fs::write(device.join("numa_node"), "1\n")?;
        fs::write(node.join("cpulist"), "4-5\n")?;
        let found = (cpus_near_in(&sys, "nic7"), cpus_near_in(&sys, "nic8"), cpus_near_in(&sys, "../nic7"));
        fs::write(device.join("numa_node"), "-1\n")?;
        let nowhere = cpus_near_in(&sys, "nic7");
        fs::remove_dir_all(&sys)?;
        assert_eq!(found, (Some(vec![4, 5]), None, None));
        assert_eq!(nowhere, None);
        Ok(())
    }
}
