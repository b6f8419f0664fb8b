// The ranks of a litmus test: one stream each, spread over the GPUs of this process, with memory that all of them map.
// More ranks than GPUs share a GPU, so one GPU is enough to run every test.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace litmus {

constexpr int kMaxRanks = 16;
constexpr uint32_t kFlagStride = 16;    // u64 words: a 128-byte line per flag
constexpr uint32_t kMaxVectors = 1024;  // 16-byte vectors per (source, destination) pair
constexpr uint32_t kRoundsPerGraph = 8;
constexpr uint64_t kDeadlineNs = 2'000'000'000;  // of every device wait

/// The findings of a rank's kernels. `first` is the first wrong 16-byte vector.
struct Tally {
  unsigned long long violations;
  unsigned int timeouts;
  unsigned int stop;  // set by the first time-out on this rank: later waits give up at once
  struct {
    uint32_t taken, iteration, src, dst, index, expected, found;
  } first;
};

/// One rank's pointers to everybody's memory; passed to kernels by value. Index p is rank p's memory.
struct View {
  int rank;
  int size;
  uint32_t vectors;              // 16-byte vectors of a (source, destination) pair, at most kMaxVectors
  uint4* inbox[kMaxRanks];       // [size][kMaxVectors], by source: written by peers (dispatch puts)
  uint4* outbox[kMaxRanks];      // [size][kMaxVectors], by reader: read by peers (combine gets)
  uint64_t* arrived[kMaxRanks];  // [size] flags, kFlagStride words apart, by the rank that publishes
  uint64_t* ended[kMaxRanks];    // the same for the end of a round
  uint32_t* joined;              // [4] own counters of CTAs, one per join in an iteration
  uint32_t* epoch;               // [1] own round number, for tests of several kernels
  Tally* tally;                  // own
};

/// Every rank's memory and stream. Memory is zeroed by reset().
class Fleet {
 public:
  Fleet(int num_ranks, int num_gpus);
  ~Fleet();
  Fleet(const Fleet&) = delete;  // owns device memory
  Fleet& operator=(const Fleet&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int num_gpus() const { return num_gpus_; }

  void reset();
  View view(int rank, uint32_t vectors) const;

  /// Enqueues launch(rank, stream) for every rank with the rank's device current.
  void on_each(const std::function<void(int, cudaStream_t)>& launch) const;

  /// Captures kRoundsPerGraph calls of record(rank, stream) into one graph per rank and replays them all, `rounds` in
  /// total.
  void replay_on_each(uint32_t rounds, const std::function<void(int, cudaStream_t)>& record) const;

  /// Waits for all streams; returns the sum of the tallies (`first` of the lowest rank that has one).
  Tally collect() const;

 private:
  struct Rank {
    int device;
    cudaStream_t stream;
    uint8_t* memory;
    Tally* tally;
  };
  std::vector<Rank> ranks_;
  int num_gpus_;
};

void check(cudaError_t status, const char* what);

}  // namespace litmus
