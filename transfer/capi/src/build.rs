//! An engine from `pt_engine_options`.

use std::ffi::{c_char, c_int, c_void};

use super::ffi::{Context, PeerCallback, from, missing, right_size, seconds, slice, string, text};
use putget_transfer::{Device, DeviceGroup, Engine, Error, Readmit, SimNetwork, Topology, WhenFull, bindings};

/// `pt_device_group`.
#[repr(C)]
pub struct CDeviceGroup {
    pub provider: *const c_char,
    pub nics: usize,
    pub sources: *const *const c_char,
    pub network: *const SimNetwork,
    pub has_gpu: c_int,
    pub gpu: u16,
    pub cpus: *const usize,
    pub cpu_count: usize,
}

/// `pt_engine_options`.
#[repr(C)]
pub struct EngineOptions {
    pub size: usize,
    pub groups: *const CDeviceGroup,
    pub group_count: usize,
    pub secret: *const u8,
    pub secret_len: usize,
    pub heartbeat_interval: f64,
    pub heartbeat_timeout: f64,
    pub connect_timeout: f64,
    pub default_deadline: f64,
    pub grace: f64,
    pub min_shard: u64,
    pub max_submissions: usize,
    pub refuse_when_full: c_int,
    pub busy_poll: c_int,
    pub callback_threads: usize,
    pub peer_event: PeerCallback,
    pub context: *mut c_void,
    pub readmit: c_int,
}

impl CDeviceGroup {
    /// # Safety
    /// Every pointer is null or valid, as the header says.
    unsafe fn sources(&self) -> Result<Vec<Option<String>>, Error> {
        if self.sources.is_null() {
            return Ok(vec![None; self.nics]);
        }
        // SAFETY: the caller promises it, here and below.
        let named = unsafe { slice("sources", self.sources, self.nics)? };
        // SAFETY: as above.
        let read = |name: &*const c_char| Ok(Some(unsafe { string("sources", *name)? }));
        named.iter().map(read).collect()
    }

    /// # Safety
    /// As above.
    unsafe fn read(&self) -> Result<DeviceGroup, Error> {
        // SAFETY: the caller promises it, here and below.
        let (provider, sources) = unsafe { (string("provider", self.provider)?, self.sources()?) };
        let sources: Vec<_> = sources.iter().map(Option::as_deref).collect();
        let mut group = match provider.as_str() {
            // SAFETY: as above.
            "sim" => DeviceGroup::sim(unsafe { from("network", self.network)? }, self.nics),
            "nvlink" if self.nics > 1 => {
                return Err(Error::argument("nics", format!("{} came; nvlink has 1", self.nics)));
            }
            "nvlink" => DeviceGroup::nvlink(self.gpu),
            "verbs" if self.nics == 0 && self.sources.is_null() => {
                let device = if self.has_gpu != 0 { Device::Cuda(self.gpu) } else { Device::Host };
                DeviceGroup::verbs_near(&Topology::here(), device)?
            }
            "verbs" => {
                let named = sources.iter().copied().collect::<Option<Vec<_>>>();
                DeviceGroup::verbs(&named.ok_or_else(|| missing("sources"))?)
            }
            _ => DeviceGroup::libfabric(&provider, &sources),
        };
        if self.has_gpu != 0 {
            group = group.device(Device::Cuda(self.gpu));
        }
        if self.cpu_count > 0 {
            // SAFETY: as above.
            group = group.cpus(unsafe { slice("cpus", self.cpus, self.cpu_count)? }.to_vec());
        }
        Ok(group)
    }
}

/// # Safety
/// Every pointer is null or valid, as the header says.
pub(super) unsafe fn build(options: &EngineOptions) -> Result<Engine, Error> {
    right_size(options.size, size_of::<EngineOptions>())?;
    let readmit = match options.readmit {
        0 => Readmit::Asked,
        1 => Readmit::Lost,
        2 => Readmit::Auto,
        other => return Err(Error::argument("readmit", format!("{other} came; 0 to 2 are allowed (pt_readmit)"))),
    };
    let mut builder = Engine::builder().busy_poll(options.busy_poll != 0).readmit(readmit);
    // SAFETY: the caller promises it, here and below.
    for group in unsafe { slice("groups", options.groups, options.group_count)? } {
        // SAFETY: as above.
        builder = builder.group(unsafe { group.read()? });
    }
    if !options.secret.is_null() {
        // SAFETY: as above.
        builder = builder.secret(unsafe { slice("secret", options.secret, options.secret_len)? });
    }
    let interval = seconds("heartbeat_interval", options.heartbeat_interval)?;
    let timeout = seconds("heartbeat_timeout", options.heartbeat_timeout)?;
    builder = match (interval, timeout) {
        (None, None) => builder,
        (Some(interval), Some(timeout)) => builder.heartbeat(interval, timeout),
        _ => return Err(Error::argument("heartbeat_timeout", "one of interval and timeout came; both are needed")),
    };
    if let Some(timeout) = seconds("connect_timeout", options.connect_timeout)? {
        builder = builder.connect_timeout(timeout);
    }
    if let Some(deadline) = seconds("default_deadline", options.default_deadline)? {
        builder = builder.default_deadline(deadline);
    }
    if let Some(grace) = seconds("grace", options.grace)? {
        builder = builder.grace(grace);
    }
    if options.min_shard > 0 {
        builder = builder.min_shard(options.min_shard);
    }
    let full = if options.refuse_when_full != 0 { WhenFull::Refuse } else { WhenFull::Wait };
    let most = if options.max_submissions > 0 { options.max_submissions } else { 1 << 16 };
    builder = builder.max_submissions(most, full);
    if options.callback_threads > 0 {
        builder = builder.callback_threads(options.callback_threads);
    }
    if let Some(callback) = options.peer_event {
        let context = Context(options.context);
        builder = builder.on_peer_event(move |event| {
            let name = text(&event.peer.to_string());
            let words = event.down.map(|reason| text(&reason.to_string()));
            let words = words.as_ref().map_or(std::ptr::null(), |words| words.as_ptr());
            // SAFETY: the caller gave this function for this, and the strings live through the call.
            unsafe { callback(context.pointer(), name.as_ptr(), bindings::down(event.down), words) };
        });
    }
    builder.build()
}
