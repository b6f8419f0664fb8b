// Symmetric memory between GPUs: physical memory of the driver's virtual memory API, mapped by every rank.
#pragma once

#include <vector>

#include "backend.h"
#include "cuda/driver.h"

namespace putget::cuda {

class SymmetricMemory {
 public:
  explicit SymmetricMemory(const MemoryConfig& config);
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;             // owns mappings
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;  // owns mappings

  putget_share export_share() const;
  // Maps a peer's memory at that peer's address here, replacing what was mapped there. The descriptor stays the
  // caller's.
  void import_share(uint32_t peer, const putget_share& share);
  // New physical memory at the same own address. The device must be idle. Peers that do not import it keep the old
  // pages.
  void renew();

  uint8_t* base(uint32_t rank) const { return reinterpret_cast<uint8_t*>(address_[rank]); }

 private:
  void map(uint32_t rank, CUmemGenericAllocationHandle handle);
  void unmap(uint32_t rank);
  void release_all();
  CUmemAllocationProp properties() const;

  const MemoryConfig config_;
  size_t mapped_bytes_ = 0;  // config_.bytes rounded up to what the driver allocates
  std::vector<CUdeviceptr> address_;
  std::vector<CUmemGenericAllocationHandle> handle_;  // 0: nothing is mapped there
};

}  // namespace putget::cuda
