#include "fleet.cuh"

#include <cstdio>
#include <cstdlib>

namespace litmus {
namespace {

// One rank's memory, in this order: inbox, outbox, arrived flags, ended flags, joins, epoch.
size_t rows_bytes(int size) { return sizeof(uint4) * kMaxVectors * size; }
size_t flags_bytes(int size) { return sizeof(uint64_t) * kFlagStride * size; }
constexpr size_t kPrivateBytes = 256;
size_t rank_bytes(int size) { return 2 * rows_bytes(size) + 2 * flags_bytes(size) + kPrivateBytes; }

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "litmus: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

Fleet::Fleet(int num_ranks, int num_gpus) : ranks_(num_ranks), num_gpus_(num_gpus) {
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    for (int peer = 0; peer < num_gpus; ++peer)
      if (peer != gpu) check(cudaDeviceEnablePeerAccess(peer, 0), "cudaDeviceEnablePeerAccess");
  }
  for (int r = 0; r < num_ranks; ++r) {
    Rank& rank = ranks_[r];
    rank.device = r % num_gpus;
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaMalloc(&rank.memory, rank_bytes(num_ranks)), "cudaMalloc");
    check(cudaMalloc(&rank.tally, sizeof(Tally)), "cudaMalloc");
  }
  reset();
}

Fleet::~Fleet() {
  for (Rank& rank : ranks_) {
    cudaSetDevice(rank.device);
    cudaStreamDestroy(rank.stream);
    cudaFree(rank.memory);
    cudaFree(rank.tally);
  }
}

void Fleet::reset() {
  for (Rank& rank : ranks_) {
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    check(cudaMemset(rank.memory, 0, rank_bytes(size())), "cudaMemset");
    check(cudaMemset(rank.tally, 0, sizeof(Tally)), "cudaMemset");
  }
  for (Rank& rank : ranks_) {
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
}

View Fleet::view(int rank, uint32_t vectors) const {
  View view{};
  view.rank = rank;
  view.size = size();
  view.vectors = vectors;
  for (int p = 0; p < size(); ++p) {
    uint8_t* at = ranks_[p].memory;
    view.inbox[p] = reinterpret_cast<uint4*>(at);
    at += rows_bytes(size());
    view.outbox[p] = reinterpret_cast<uint4*>(at);
    at += rows_bytes(size());
    view.arrived[p] = reinterpret_cast<uint64_t*>(at);
    at += flags_bytes(size());
    view.ended[p] = reinterpret_cast<uint64_t*>(at);
    at += flags_bytes(size());
    if (p == rank) {
      view.joined = reinterpret_cast<uint32_t*>(at);
      view.epoch = view.joined + 32;
    }
  }
  view.tally = ranks_[rank].tally;
  return view;
}

void Fleet::on_each(const std::function<void(int, cudaStream_t)>& launch) const {
  for (int r = 0; r < size(); ++r) {
    check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
    launch(r, ranks_[r].stream);
    check(cudaGetLastError(), "kernel launch");
  }
}

void Fleet::replay_on_each(uint32_t rounds, const std::function<void(int, cudaStream_t)>& record) const {
  std::vector<cudaGraphExec_t> graphs;
  on_each([&](int rank, cudaStream_t stream) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    for (uint32_t n = 0; n < kRoundsPerGraph; ++n) record(rank, stream);
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(graphs.back(), stream), "cudaGraphUpload");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  });
  // Replay by replay over the ranks: a full launch queue must never hold back the peer that it waits for.
  for (uint32_t n = 0; n < rounds; n += kRoundsPerGraph)
    on_each([&](int rank, cudaStream_t stream) { check(cudaGraphLaunch(graphs[rank], stream), "cudaGraphLaunch"); });
  on_each([&](int rank, cudaStream_t stream) {
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaGraphExecDestroy(graphs[rank]), "cudaGraphExecDestroy");
  });
}

Tally Fleet::collect() const {
  Tally sum{};
  for (const Rank& rank : ranks_) {
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    check(cudaStreamSynchronize(rank.stream), "cudaStreamSynchronize");
    Tally one;
    check(cudaMemcpy(&one, rank.tally, sizeof one, cudaMemcpyDeviceToHost), "cudaMemcpy");
    sum.violations += one.violations;
    sum.timeouts += one.timeouts;
    if (sum.first.taken == 0) sum.first = one.first;
  }
  return sum;
}

}  // namespace litmus
