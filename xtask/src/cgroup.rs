//! Runs a command under a memory limit that includes the page cache: cgroup v1 or v2, if this user may create one.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

static GROUPS: AtomicU64 = AtomicU64::new(0);

/// A memory cgroup of our own, removed when dropped.
pub struct Group {
    directory: PathBuf,
    version: u8,
}

impl Group {
    /// Creates a group limited to `bytes`. The error explains why none can be created.
    pub fn create(bytes: u64) -> Result<Group> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (parent, version) = if v1.is_dir() { (v1, 1) } else { (Path::new("/sys/fs/cgroup"), 2) };
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let name = format!("esker-{}-{number}", std::process::id());
        let group = Group { directory: parent.join(name), version };
        fs::create_dir(&group.directory).context("no memory group can be made here")?;
        let file = if version == 1 { "memory.limit_in_bytes" } else { "memory.max" };
        fs::write(group.directory.join(file), bytes.to_string())
            .context("the memory group takes no limit")?;
        if version == 2 {
            // Swapping would hide that the limit is exceeded.
            let _ = fs::write(group.directory.join("memory.swap.max"), "0");
        }
        Ok(group)
    }

    /// The same command, started inside the group.
    pub fn wrap(&self, command: &Command) -> Command {
        let mut wrapped = Command::new("sh");
        wrapped.arg("-c").arg("echo $$ > \"$0\" && exec \"$@\"").arg(self.directory.join("cgroup.procs"));
        wrapped.arg(command.get_program()).args(command.get_args());
        if let Some(directory) = command.get_current_dir() {
            wrapped.current_dir(directory);
        }
        wrapped
    }

    /// Peak bytes of the group, page cache included, if the kernel reports it.
    pub fn peak_bytes(&self) -> Option<u64> {
        let file = if self.version == 1 { "memory.max_usage_in_bytes" } else { "memory.peak" };
        fs::read_to_string(self.directory.join(file)).ok()?.trim().parse().ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
