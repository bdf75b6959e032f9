use crate::ByteCount;
use std::{fs, path::Path};

/// The memory a job may use. It is a limit: every buffer is sized from it before work starts, and a job that cannot
/// keep to it is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Resident memory of this process, without the page cache.
    pub host_bytes: u64,
}

/// How much memory this process may use on this machine, and the source of the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit.
    pub bytes: u64,
    /// Its source, in words for a user.
    pub from: String,
}

impl Budget {
    /// The budget for `--memory`, or four fifths of the machine's limit.
    pub fn resolve(asked: Option<ByteCount>) -> Budget {
        let host_bytes = asked.map_or_else(|| machine_memory_limit().bytes / 5 * 4, |asked| asked.0);
        Budget { host_bytes }
    }

    /// The same, but more than the machine or the cgroup has is refused.
    pub fn within_machine(asked: Option<ByteCount>) -> Result<Budget, OverMachine> {
        let most = machine_memory();
        match asked {
            Some(asked) if asked.0 > most.bytes => Err(OverMachine { asked, most }),
            asked => Ok(Budget::resolve(asked)),
        }
    }
}

/// A budget that no process can have here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "--memory is {asked}, and this process can get at most {}, by its {}; give less, such as --memory {}",
    ByteCount(most.bytes), most.from, ByteCount(most.bytes / 5 * 4).flag_value()
)]
pub struct OverMachine {
    /// What was requested.
    pub asked: ByteCount,
    /// What there is.
    pub most: MemoryLimit,
}

/// The smaller of the machine's memory and the cgroup limit of this process.
fn machine_memory() -> MemoryLimit {
    let all = MemoryLimit {
        bytes: meminfo_bytes("MemTotal").unwrap_or(u64::MAX),
        from: "memory (MemTotal)".into(),
    };
    match cgroup_limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")) {
        Some(limit) if limit.bytes < all.bytes => limit,
        _ => all,
    }
}

/// The smaller of the available memory and the cgroup limit (v1 or v2) of this process.
pub fn machine_memory_limit() -> MemoryLimit {
    let available = MemoryLimit {
        bytes: meminfo_bytes("MemAvailable").unwrap_or(4 << 30),
        from: "available memory (MemAvailable)".into(),
    };
    match cgroup_limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")) {
        Some(limit) if limit.bytes < available.bytes => limit,
        _ => available,
    }
}

/// Peak resident memory of this process so far (`VmHWM`); 0 if the kernel does not report it.
pub fn peak_resident_bytes() -> u64 {
    kib_line(&fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmHWM").unwrap_or(0)
}

/// Current resident memory of this process's own, without memory-mapped file pages, which belong to the page cache. 0
/// if the kernel does not report it.
pub fn own_resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ["RssAnon", "RssShmem"].iter().filter_map(|key| kib_line(&status, key)).sum()
}

fn meminfo_bytes(key: &str) -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/meminfo").ok()?, key)
}

fn kib_line(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split(':').next() == Some(key))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// The smallest limit on the path from this process's group up to the root: any ancestor may have one.
fn cgroup_limit(membership: &Path, root: &Path) -> Option<MemoryLimit> {
    let text = fs::read_to_string(membership).ok()?;
    let mut tightest: Option<MemoryLimit> = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
        let (base, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            c if c.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let mut directory = base.join(group.trim_start_matches('/'));
        while directory.starts_with(&base) {
            let path = directory.join(file);
            let limit = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
            // In v1, a number near 2^63 means no limit.
            if let Some(bytes) = limit.filter(|bytes| *bytes < 1 << 60)
                && tightest.as_ref().is_none_or(|t| bytes < t.bytes)
            {
                tightest = Some(MemoryLimit { bytes, from: format!("cgroup limit ({})", path.display()) });
            }
            if !directory.pop() {
                break;
            }
        }
    }
    tightest
}

/// Bytes that the kernel has read from disks for this process so far; 0 if unknown.
pub fn disk_bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let root = std::env::temp_dir().join(format!("esker-cgroup-{}", std::process::id()));
        let group = root.join("memory/a/b");
        fs::create_dir_all(&group).unwrap();
        fs::write(root.join("memory/a/memory.limit_in_bytes"), "1000000\n").unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        let membership = root.join("cgroup");
        fs::write(&membership, "5:cpu,cpuacct:/x\n3:memory:/a/b\n").unwrap();
        assert_eq!(cgroup_limit(&membership, &root).unwrap().bytes, 1_000_000);
        fs::write(&membership, "0::/a/b\n").unwrap();
        assert_eq!(cgroup_limit(&membership, &root), None);
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/memory.max"), "2000000\n").unwrap();
        assert_eq!(cgroup_limit(&membership, &root).unwrap().bytes, 2_000_000);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_what_there_is() {
        let refused = Budget::within_machine(Some(ByteCount(1 << 60))).unwrap_err();
        let message = refused.to_string();
        assert!(message.contains("1 EiB") || message.contains("GiB"), "{message}");
        assert!(refused.most.bytes < 1 << 60 && message.contains("such as --memory"), "{message}");
        let fits = Budget::within_machine(Some(ByteCount(1 << 20))).unwrap();
        assert_eq!(fits.host_bytes, 1 << 20);
        assert!(Budget::within_machine(None).unwrap().host_bytes > 0);
    }

    #[test]
    fn this_process_has_a_peak() {
        assert!(peak_resident_bytes() > 100_000);
    }
}
