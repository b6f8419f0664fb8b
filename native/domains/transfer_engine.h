// A network between processes and hosts: a transport over one transfer engine, for one rank.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "domains/engine_library.h"
#include "domains/network.h"
#include "domains/numbered.h"
#include "protocol/domains/parcel.h"

namespace putget::proxy {

struct EngineOptions {
  std::string library;   // the file with the engine's C functions
  std::string provider;  // a network that the engine has: "tcp", "host", "verbs", "nvlink"
  // NICs of this host, as the provider names them; none: those that the engine chooses.
  std::vector<std::string> nics;
  std::vector<uint8_t> secret;  // the same on all ranks
  uint32_t rank;
  uint32_t ranks;
  int32_t gpu;        // reaches this GPU; -1: none
  pt_engine* engine;  // to share; null: one is made, from provider, NICs and secret
};

class TransferEngine : public Network {
 public:
  // Throws Error where there is no such engine, provider or NIC.
  explicit TransferEngine(const EngineOptions& options);
  ~TransferEngine() override;
  TransferEngine(const TransferEngine&) = delete;             // the table has its address
  TransferEngine& operator=(const TransferEngine&) = delete;  // the table has its address

  uint32_t ranks() const override { return ranks_; }
  const putget_transport* table(uint32_t rank) const override { return rank == rank_ ? &table_ : nullptr; }
  Thread& stepper() override { return *stepper_; }

 private:
  struct Target {
    pt_desc* desc;
    uint32_t first_imm;
  };
  static int add_region(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region);
  static int describe_region(void* self, uint32_t region, uint8_t* description, uint64_t* bytes);
  static int address(void* self, uint8_t* address, uint64_t* bytes);
  static int add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer);
  static int add_target(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes, uint32_t* target);
  static int counter_word(void* self, uint32_t imm, const uint64_t** word);
  static int write(void* self, const putget_transport_write* write);
  static int remove_region(void* self, uint32_t region);
  static const char* error(void* self);

  void make_engine(const EngineOptions& options, const std::string& what);
  void open(const EngineOptions& options);
  void reserve(const std::string& what);
  void close();
  // Both keep the words of a failure for `error`.
  int tell(int status);
  int refuse(const char* why);

  const EngineLibrary library_;
  const uint32_t rank_;
  const uint32_t ranks_;
  pt_engine* engine_ = nullptr;  // a handle of this object's own
  // Immediates: all of them on an engine of this object's own, otherwise a range.
  pt_imms* imms_ = nullptr;
  uint32_t sender_bits_ = kSenderBits;
  uint32_t first_imm_ = 0;           // here; each peer has one of its own
  double write_deadline_ = 0;        // 0: the engine's
  std::vector<pt_poster*> posters_;  // one per NIC, by turns
  size_t next_ = 0;
  Numbered<pt_mr> regions_;
  Numbered<Target> targets_;
  std::map<std::string, uint32_t> peers_;  // by address
  std::vector<uint32_t> peer_imms_;        // [peers_.size()] first immediate at each peer
  putget_transport table_{};
  std::unique_ptr<Thread> stepper_;
};

}  // namespace putget::proxy
