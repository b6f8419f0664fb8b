#include "cuda/symmetric_memory.h"

#include <cstring>

namespace putget::cuda {
namespace {

CUmemAllocationHandleType handle_type(bool fabric) {
  return fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

}  // namespace

SymmetricMemory::SymmetricMemory(const MemoryConfig& config)
    : config_(config), address_(config.ep_size, 0), handle_(config.ep_size, 0) {
  const CUmemAllocationProp wanted = properties();
  size_t granularity = 0;
  check(driver().allocation_granularity(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  mapped_bytes_ = (config.bytes + granularity - 1) / granularity * granularity;
  try {
    // One address range per rank for the life of the object: renewing physical memory never moves anything.
    for (CUdeviceptr& address : address_) {
      check(driver().address_reserve(&address, mapped_bytes_, granularity, 0, 0), "cuMemAddressReserve");
    }
    renew();
  } catch (const Error&) {
    release_all();
    throw;
  }
}

SymmetricMemory::~SymmetricMemory() { release_all(); }

CUmemAllocationProp SymmetricMemory::properties() const {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = config_.ordinal;
  wanted.requestedHandleTypes = handle_type(config_.fabric);
  return wanted;
}

putget_share SymmetricMemory::export_share() const {
  putget_share share{};
  share.bytes = config_.bytes;
  share.descriptor = -1;
  const CUmemGenericAllocationHandle own = handle_[config_.ep_rank];
  if (config_.fabric) {
    static_assert(sizeof(CUmemFabricHandle) == sizeof(share.fabric), "putget.h reserves room for a fabric handle");
    share.kind = PUTGET_SHARE_FABRIC;
    check(driver().export_handle(share.fabric, own, CU_MEM_HANDLE_TYPE_FABRIC, 0), "exporting a fabric handle");
  } else {
    share.kind = PUTGET_SHARE_DESCRIPTOR;
    int descriptor = -1;
    check(driver().export_handle(&descriptor, own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "exporting a descriptor");
    share.descriptor = descriptor;
  }
  return share;
}

void SymmetricMemory::import_share(uint32_t peer, const putget_share& share) {
  const bool fabric = share.kind == PUTGET_SHARE_FABRIC;
  if (fabric != config_.fabric) throw Error(PUTGET_INVALID, "share.kind differs from this memory's");
  CUmemGenericAllocationHandle handle = 0;
  void* os_handle = fabric ? const_cast<uint8_t*>(share.fabric)
                           : reinterpret_cast<void*>(static_cast<uintptr_t>(static_cast<unsigned>(share.descriptor)));
  const std::string what = "importing the memory of rank " + std::to_string(peer);
  check(driver().import_handle(&handle, os_handle, handle_type(fabric)), what);
  unmap(peer);
  map(peer, handle);
}

void SymmetricMemory::renew() {
  const CUmemAllocationProp wanted = properties();
  CUmemGenericAllocationHandle fresh = 0;
  check(driver().memory_create(&fresh, mapped_bytes_, &wanted, 0),
        "allocating " + std::to_string(mapped_bytes_) + " bytes of symmetric memory");
  unmap(config_.ep_rank);
  map(config_.ep_rank, fresh);
}

void SymmetricMemory::map(uint32_t rank, CUmemGenericAllocationHandle handle) {
  const std::string what = "mapping the memory of rank " + std::to_string(rank);
  const CUresult mapped = driver().memory_map(address_[rank], mapped_bytes_, 0, handle, 0);
  if (mapped != CUDA_SUCCESS) driver().memory_release(handle);
  check(mapped, what);
  handle_[rank] = handle;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = config_.ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver().set_access(address_[rank], mapped_bytes_, &access, 1), what + " (is there a direct link to its GPU?)");
}

void SymmetricMemory::unmap(uint32_t rank) {
  if (handle_[rank] == 0) return;
  check(driver().memory_unmap(address_[rank], mapped_bytes_), "cuMemUnmap");
  check(driver().memory_release(handle_[rank]), "cuMemRelease");
  handle_[rank] = 0;
}

// For the destructor: goes on after an error, because there is nobody to tell.
void SymmetricMemory::release_all() {
  for (uint32_t rank = 0; rank < config_.ep_size; ++rank) {
    if (handle_[rank] != 0) {
      driver().memory_unmap(address_[rank], mapped_bytes_);
      driver().memory_release(handle_[rank]);
    }
    if (address_[rank] != 0) driver().address_free(address_[rank], mapped_bytes_);
  }
}

}  // namespace putget::cuda
