// The CUDA driver's entry points, looked up at run time: the library loads on machines without a driver.
#pragma once

#include <cuda.h>

#include <string>

namespace putget::cuda {

struct Driver {
  decltype(&cuInit) init;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetCount) device_count;
  decltype(&cuDeviceGetName) device_name;
  decltype(&cuDeviceGetUuid_v2) device_uuid;
  decltype(&cuDeviceTotalMem_v2) device_total_memory;
  decltype(&cuDeviceGetAttribute) device_attribute;
  decltype(&cuDeviceCanAccessPeer) device_can_access_peer;
  decltype(&cuMemGetAllocationGranularity) allocation_granularity;
  decltype(&cuMemCreate) memory_create;
  decltype(&cuMemRelease) memory_release;
  decltype(&cuMemAddressReserve) address_reserve;
  decltype(&cuMemAddressFree) address_free;
  decltype(&cuMemMap) memory_map;
  decltype(&cuMemUnmap) memory_unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  // Null before CUDA 12.4, all of them:
  decltype(&cuStreamGetGreenCtx) stream_green_context;
  decltype(&cuGreenCtxGetDevResource) green_context_resource;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuCtxGetDevResource) context_resource;
};

// Throws Error(PUTGET_UNAVAILABLE) where there is no driver or no GPU.
const Driver& driver();

// Throws Error(PUTGET_SYSTEM) with the driver's words.
void check(CUresult status, const std::string& what);

}  // namespace putget::cuda
