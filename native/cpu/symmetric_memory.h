// Symmetric memory between processes of one host: anonymous shared memory, passed as descriptors.
#pragma once

#include <cstdint>
#include <vector>

namespace putget::cpu {

// The memory never has a name, so no crash at any moment can leave a file behind, and the size of /dev/shm does not
// bound it.
class SymmetricMemory {
 public:
  SymmetricMemory(uint32_t ep_size, uint32_t ep_rank, uint64_t bytes);
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;             // owns mappings
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;  // owns mappings

  // A new descriptor of the own memory, for a peer.
  int export_descriptor() const;
  // Maps a peer's memory at that peer's address here, replacing what was mapped there. The descriptor stays the
  // caller's.
  void import_descriptor(uint32_t peer, int descriptor);
  // New, zeroed pages at the same own address. Peers that do not import them keep the old ones.
  void renew();

  uint8_t* base(uint32_t rank) const { return base_[rank]; }

 private:
  void map(uint32_t rank, int descriptor);

  const uint32_t own_;
  const uint64_t bytes_;
  int descriptor_ = -1;
  std::vector<uint8_t*> base_;
};

}  // namespace putget::cpu
