// Capabilities of this machine's GPUs, found without making a context on any of them.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "backend.h"
#include "cuda/driver.h"

namespace putget::cuda {
namespace {

int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

// The part of NVML that tells the NVLink cluster. Its header is not among the packages that the build uses.
struct NvmlFabricInfo {
  unsigned int version;
  unsigned char cluster_uuid[16];
  int status;
  unsigned int clique;
  unsigned char state;
  unsigned int health;
};
constexpr unsigned int kNvmlFabricVersion = static_cast<unsigned int>(sizeof(NvmlFabricInfo)) | 2u << 24;
constexpr unsigned char kNvmlFabricCompleted = 3;

// Leaves the cluster empty where NVML is missing or says nothing.
void add_cluster(putget_gpu& gpu) {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto by_uuid = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
  const auto fabric = reinterpret_cast<int (*)(void*, void*)>(dlsym(library, "nvmlDeviceGetGpuFabricInfoV"));
  if (init == nullptr || by_uuid == nullptr || fabric == nullptr || init() != 0) return;
  char uuid[64] = "GPU-";
  size_t at = 4;
  for (int i = 0; i < 16; ++i) {
    at += static_cast<size_t>(std::snprintf(uuid + at, sizeof(uuid) - at, "%02x", gpu.uuid[i]));
    if (i == 3 || i == 5 || i == 7 || i == 9) uuid[at++] = '-';
  }
  uuid[at] = '\0';
  void* device = nullptr;
  NvmlFabricInfo info{};
  info.version = kNvmlFabricVersion;
  if (by_uuid(uuid, &device) != 0 || fabric(device, &info) != 0) return;
  if (info.state != kNvmlFabricCompleted || info.status != 0) return;
  std::memcpy(gpu.cluster_uuid, info.cluster_uuid, sizeof(gpu.cluster_uuid));
  gpu.clique = info.clique;
}

}  // namespace

uint32_t gpu_count() {
  int count = 0;
  check(driver().device_count(&count), "cuDeviceGetCount");
  return static_cast<uint32_t>(count);
}

putget_gpu gpu_report(uint32_t ordinal) {
  const uint32_t count = gpu_count();
  if (ordinal >= count) {
    throw Error(PUTGET_INVALID, "ordinal is " + std::to_string(ordinal) + ", there are " + std::to_string(count));
  }
  CUdevice device = 0;
  check(driver().device_get(&device, static_cast<int>(ordinal)), "cuDeviceGet");
  putget_gpu gpu{};
  check(driver().device_name(gpu.name, sizeof(gpu.name), device), "cuDeviceGetName");
  CUuuid uuid;
  check(driver().device_uuid(&uuid, device), "cuDeviceGetUuid");
  std::memcpy(gpu.uuid, uuid.bytes, sizeof(gpu.uuid));
  size_t bytes = 0;
  check(driver().device_total_memory(&bytes, device), "cuDeviceTotalMem");
  gpu.total_bytes = bytes;
  gpu.compute_major = static_cast<uint32_t>(attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  gpu.compute_minor = static_cast<uint32_t>(attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  gpu.num_sms = static_cast<uint32_t>(attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  gpu.posix_descriptors =
      static_cast<uint32_t>(attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED));
  gpu.fabric_handles = static_cast<uint32_t>(attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED));
  for (uint32_t other = 0; other < count && other < 32; ++other) {
    CUdevice peer = 0;
    int reachable = 0;
    check(driver().device_get(&peer, static_cast<int>(other)), "cuDeviceGet");
    if (other != ordinal) check(driver().device_can_access_peer(&reachable, device, peer), "cuDeviceCanAccessPeer");
    if (reachable) gpu.peers |= 1u << other;
  }
  add_cluster(gpu);
  return gpu;
}

}  // namespace putget::cuda
