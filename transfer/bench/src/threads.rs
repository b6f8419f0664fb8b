//! The cost of this process's threads, as Linux shows it in `/proc/self/task`.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::Outcome;

/// Time on a processor of each thread whose name holds this. A thread that has just started may not have its name yet, and one that has
/// been joined may be here for a moment more.
pub fn processor_times(name: &str) -> Outcome<Vec<Duration>> {
    let mut times = Vec::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        times.extend(time_of(&task?.path(), name)?);
    }
    Ok(times)
}

/// None: the thread has another name, or has ended since the folder was read.
fn time_of(task: &Path, name: &str) -> Outcome<Option<Duration>> {
    if !unless_ended(std::fs::read_to_string(task.join("comm")))?.is_some_and(|comm| comm.contains(name)) {
        return Ok(None);
    }
    let Some(times) = unless_ended(std::fs::read_to_string(task.join("schedstat")))? else { return Ok(None) };
    let ran = times.split_whitespace().next().ok_or("an empty schedstat")?;
    Ok(Some(Duration::from_nanos(ran.parse()?)))
}

/// None where Linux says that the thread is no more: by its folder, or while its file is read.
fn unless_ended(text: io::Result<String>) -> io::Result<Option<String>> {
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
