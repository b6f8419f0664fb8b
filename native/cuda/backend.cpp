// The CUDA backend: symmetric memory, private state, and the launch of kernels.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/check.h"
#include "cuda/domains.h"
#include "cuda/launch.h"
#include "cuda/moe_launch.h"
#include "cuda/sms.h"
#include "cuda/symmetric_memory.h"
#include "protocol/round/signal.h"
#include "protocol/round/words.h"

namespace putget::cuda {
namespace {

constexpr int kFirstComputeMajor = 9;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const MemoryConfig& config) : Backend(config), symmetric_((require_device(config), config)) {
    int num_sms = 0;
    check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, config.ordinal), "cudaDeviceGetAttribute");
    num_sms_ = static_cast<uint32_t>(num_sms);
    load_dispatch_kernels();
    load_combine_kernels();
    load_moe_group_kernels();
    load_moe_row_kernels();
    load_moe_pair_kernels();
    load_moe_compact_kernels();
    load_moe_activation_kernels();
    load_moe_networks_kernels(config.ordinal);
    void* state = nullptr;
    check(cudaMalloc(&state, sizeof(State)), "allocating private state");
    state_ = static_cast<State*>(state);
    void* fault = nullptr;
    const cudaError_t status = cudaHostAlloc(&fault, sizeof(FaultRecord), cudaHostAllocMapped | cudaHostAllocPortable);
    if (status != cudaSuccess) cudaFree(state_);
    check(status, "allocating the fault record");
    fault_ = static_cast<FaultRecord*>(fault);
    *fault_ = FaultRecord{};
  }

  ~CudaBackend() override {
    undo(config_.ordinal, [&] {
      cudaDeviceSynchronize();
      cudaFree(state_);
      cudaFreeHost(fault_);
    });
  }

  putget_share export_share() override { return symmetric_.export_share(); }

  void import_share(uint32_t peer, const putget_share& share) override {
    DeviceScope scope(config_.ordinal);
    symmetric_.import_share(peer, share);
  }

  void renew() override {
    DeviceScope scope(config_.ordinal);
    check(cudaDeviceSynchronize(), "waiting for the device");
    symmetric_.renew();
  }

  void start(uint32_t epoch, const RankSet& active) override {
    DeviceScope scope(config_.ordinal);
    check(cudaDeviceSynchronize(), "waiting for the device");
    clear_sentinel_rows(sentinel_begin(), config_.bytes);
    const std::vector<uint64_t> flags(control_bytes(config_.ep_size) / sizeof(uint64_t), pack_flag(epoch, 0));
    write_control(0, flags.data(), flags.size() * sizeof(uint64_t));
    State state{};
    state.head.epoch = epoch;
    state.head.active = active;
    state.head.mixed = mixed_;
    std::fill_n(state.sent, kMaxParts, pack_flag(epoch, 0));
    write_state(state);
    *fault_ = FaultRecord{};
  }

  State read_state() override {
    DeviceScope scope(config_.ordinal);
    check(cudaDeviceSynchronize(), "waiting for the device");
    State state{};
    check(cudaMemcpy(&state, state_, sizeof(state), cudaMemcpyDeviceToHost), "reading private state");
    return state;
  }

  void share_between_layouts() override {
    mixed_ = 1;
    State state = read_state();
    if (state.head.mixed) return;
    state.head.mixed = 1;
    DeviceScope scope(config_.ordinal);
    std::vector<uint8_t> lines(config_.ep_size * kLineBytes, 0);
    for (uint32_t rank = 0; rank < config_.ep_size; ++rank) {
      *flag_line(lines.data(), 0, rank) = finished_before_mixing(state);
    }
    write_control(finished_lines(config_.ep_size), lines.data(), lines.size());
    write_state(state);
  }

  uint8_t* base(uint32_t rank) const override { return symmetric_.base(rank); }
  State* state() const override { return state_; }
  FaultRecord* fault() const override { return fault_; }

  void dispatch(const Plan& plan, const DispatchCall& call, const Limits& limits, void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_dispatch(plan, call, room(limits, call.half, stream), limits.dispatch, static_cast<cudaStream_t>(stream));
  }

  void combine(const Plan& plan, const CombineCall& call, const Limits& limits, void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_combine(plan, call, room(limits, call.half, stream), limits.combine, static_cast<cudaStream_t>(stream));
  }

  void launches(const Shape& shape, uint32_t num_tokens, bool sentinel, const Limits& limits, void* stream,
                putget_launch* dispatch, putget_launch* combine) const override {
    DeviceScope scope(config_.ordinal);
    const Room all = room(limits, Half::kBoth, stream);
    *dispatch = choose_dispatch(shape, num_tokens, Half::kBoth, all, limits.dispatch);
    *combine =
        choose_combine(shape, {num_tokens, 0, Half::kBoth, sentinel, false, false, false}, all, limits.combine).launch;
  }

  void release(const Plan& plan, void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_release(plan, static_cast<cudaStream_t>(stream));
  }

  void pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call, const Limits& limits,
            void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_pack(plan, across, call, room(limits, call.half, stream), static_cast<cudaStream_t>(stream));
  }
  void unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows, const Limits& limits,
              void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_unpack(plan, across, max_rows, room(limits, Half::kFinish, stream), static_cast<cudaStream_t>(stream));
  }
  void close_round(const Plan& plan, const DomainsPlan& across, uint32_t kind, void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_close(plan, across, kind, static_cast<cudaStream_t>(stream));
  }
  void serve_sources(const Plan& plan, const DomainsPlan& across, const Limits& limits, void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_serve(plan, across, room(limits, Half::kStart, stream), static_cast<cudaStream_t>(stream));
  }
  void sum_domains(const Plan& plan, const DomainsPlan& across, const CombineCall& call, const Limits& limits,
                   void* stream) override {
    DeviceScope scope(config_.ordinal);
    launch_sum(plan, across, call, room(limits, call.half, stream), static_cast<cudaStream_t>(stream));
  }

  std::shared_ptr<uint8_t> make_tables(uint64_t bytes) override {
    DeviceScope scope(config_.ordinal);
    load_domains_kernels();
    void* tables = nullptr;
    check(cudaMalloc(&tables, bytes), "allocating tables");
    const int ordinal = config_.ordinal;
    std::shared_ptr<uint8_t> made(static_cast<uint8_t*>(tables),
                                  [ordinal](uint8_t* address) { undo(ordinal, [&] { cudaFree(address); }); });
    check(cudaMemset(tables, 0, bytes), "clearing tables");
    check(cudaDeviceSynchronize(), "waiting for the device");
    return made;
  }

  std::shared_ptr<uint8_t> show_to_kernels(uint8_t* host, uint64_t bytes) override {
    constexpr uint64_t kPage = 4096;
    DeviceScope scope(config_.ordinal);
    const uint64_t whole = (bytes + kPage - 1) / kPage * kPage;
    check(cudaHostRegister(host, whole, cudaHostRegisterMapped | cudaHostRegisterPortable), "pinning host memory");
    void* seen = nullptr;
    const cudaError_t status = cudaHostGetDevicePointer(&seen, host, 0);
    if (status != cudaSuccess) cudaHostUnregister(host);
    check(status, "mapping host memory for the GPU");
    const int ordinal = config_.ordinal;
    return {static_cast<uint8_t*>(seen),
            [ordinal, host](uint8_t*) { undo(ordinal, [&] { cudaHostUnregister(host); }); }};
  }

  void place(const DomainsPlan& across) override {
    static_assert(std::is_trivially_copyable_v<DomainsPlan>);
    DeviceScope scope(config_.ordinal);
    const auto stream = static_cast<cudaStream_t>(own_stream());
    check(cudaMemcpyAsync(across.at_hand, &across, sizeof(across), cudaMemcpyHostToDevice, stream), "placing a plan");
    check(cudaStreamSynchronize(stream), "placing a plan");
  }

  bool is_on_gpu() const override { return true; }
  void* own_stream() const override { return cudaStreamPerThread; }

 private:
  // Frees memory of a device. Another thread may be capturing a graph: that is no part of it, and must not spoil it.
  template <class Body>
  static void undo(int ordinal, Body body) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(ordinal);
    body();
    cudaSetDevice(before);
    cudaThreadExchangeStreamCaptureMode(&mode);
  }

  static void require_device(const MemoryConfig& config) {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, config.ordinal), "cudaDeviceGetAttribute");
    if (major < kFirstComputeMajor) {
      throw Error(PUTGET_UNAVAILABLE, "device " + std::to_string(config.ordinal) + " has compute capability " +
                                          std::to_string(major) + ".x, needed is 9.0 or later");
    }
    check(cudaFree(nullptr), "making a CUDA context");
  }

  Room room(const Limits& limits, Half half, void* stream) const {
    return room(half == Half::kFinish ? limits.finish_num_sms : limits.num_sms, stream);
  }
  Room room(uint32_t num_sms, void* stream) const {
    const uint32_t there = sms_of(static_cast<cudaStream_t>(stream), num_sms_);
    return Room{num_sms == 0 ? there : std::min(num_sms, there), there};
  }

  void clear_sentinel_rows(uint64_t begin, uint64_t end) override {
    DeviceScope scope(config_.ordinal);
    check(cudaMemset(symmetric_.base(config_.ep_rank) + begin, kNotCome & 0xff, end - begin), "clearing rows");
    check(cudaDeviceSynchronize(), "waiting for the device");
  }

  // Into the own flags, from an offset on.
  void write_control(uint64_t offset, const void* bytes, uint64_t count) {
    check(cudaMemcpy(symmetric_.base(config_.ep_rank) + offset, bytes, count, cudaMemcpyHostToDevice), "writing flags");
  }

  void write_state(const State& state) {
    check(cudaMemcpy(state_, &state, sizeof(state), cudaMemcpyHostToDevice), "writing private state");
    check(cudaDeviceSynchronize(), "waiting for the device");
  }

  SymmetricMemory symmetric_;
  uint32_t num_sms_ = 0;
  uint32_t mixed_ = 0;
  State* state_ = nullptr;
  FaultRecord* fault_ = nullptr;
};

}  // namespace

std::unique_ptr<Backend> create_backend(const MemoryConfig& config) {
  driver();  // says what is missing
  DeviceScope scope(config.ordinal);
  return std::make_unique<CudaBackend>(config);
}

}  // namespace putget::cuda
