#include "cuda/driver.h"

#include <dlfcn.h>

#include "error.h"

namespace putget::cuda {
namespace {

template <class Function>
void look_up(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) {
    throw Error(PUTGET_UNAVAILABLE, std::string("the CUDA driver has no ") + name + ": it is older than CUDA 12");
  }
}

template <class Function>
bool has(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// All of them or none.
void look_up_contexts(void* library, Driver& driver) {
  const bool all = has(library, "cuStreamGetGreenCtx", &driver.stream_green_context) &&
                   has(library, "cuGreenCtxGetDevResource", &driver.green_context_resource) &&
                   has(library, "cuCtxGetCurrent", &driver.current_context) &&
                   has(library, "cuCtxGetDevResource", &driver.context_resource);
  if (!all) driver.stream_green_context = nullptr;
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error(PUTGET_UNAVAILABLE, "there is no CUDA driver on this machine (libcuda.so.1)");
  Driver driver{};
  look_up(library, "cuInit", &driver.init);
  look_up(library, "cuGetErrorString", &driver.error_string);
  look_up(library, "cuDeviceGet", &driver.device_get);
  look_up(library, "cuDeviceGetCount", &driver.device_count);
  look_up(library, "cuDeviceGetName", &driver.device_name);
  look_up(library, "cuDeviceGetUuid_v2", &driver.device_uuid);
  look_up(library, "cuDeviceTotalMem_v2", &driver.device_total_memory);
  look_up(library, "cuDeviceGetAttribute", &driver.device_attribute);
  look_up(library, "cuDeviceCanAccessPeer", &driver.device_can_access_peer);
  look_up(library, "cuMemGetAllocationGranularity", &driver.allocation_granularity);
  look_up(library, "cuMemCreate", &driver.memory_create);
  look_up(library, "cuMemRelease", &driver.memory_release);
  look_up(library, "cuMemAddressReserve", &driver.address_reserve);
  look_up(library, "cuMemAddressFree", &driver.address_free);
  look_up(library, "cuMemMap", &driver.memory_map);
  look_up(library, "cuMemUnmap", &driver.memory_unmap);
  look_up(library, "cuMemSetAccess", &driver.set_access);
  look_up(library, "cuMemExportToShareableHandle", &driver.export_handle);
  look_up(library, "cuMemImportFromShareableHandle", &driver.import_handle);
  look_up(library, "cuTensorMapEncodeTiled", &driver.encode_tiled);
  look_up_contexts(library, driver);
  const CUresult status = driver.init(0);
  if (status != CUDA_SUCCESS) {
    const char* text = nullptr;
    driver.error_string(status, &text);
    throw Error(PUTGET_UNAVAILABLE, std::string("the CUDA driver does not start: ") + (text != nullptr ? text : "?"));
  }
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // a failed load is tried again by the next call
  return loaded;
}

void check(CUresult status, const std::string& what) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(status, &text);
  throw Error(PUTGET_SYSTEM, what + ": " + (text != nullptr ? text : std::to_string(status)));
}

}  // namespace putget::cuda
