// Prints which kernel runs when, by native/choose.cpp, for the table of docs/protocol/paths.md. A line: ranks, SMs,
// from how many tokens a rank; then of dispatch and of combine path, blocks and threads.
#include <cstdio>

#include "choose.cpp"

namespace {

using namespace putget;

constexpr uint32_t kGpuSms = 132;
constexpr uint32_t kTokens[] = {1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096};

// DeepSeek-V3: FP8 rows with a float32 scale for each 128 values, BF16 output.
Shape shape_of(uint32_t ep_size) {
  Shape shape{};
  shape.ep_size = ep_size;
  shape.num_experts = 256;
  shape.top_k = 8;
  shape.max_tokens_per_rank = 4096;
  shape.num_payloads = 2;
  shape.row_bytes[0] = 7168;
  shape.row_bytes[1] = 56 * 4;
  shape.output_elements = 7168;
  shape.output_type = OutputType::kBFloat16;
  return shape;
}

void print_row(uint32_t ep_size, uint32_t sms) {
  const Shape shape = shape_of(ep_size);
  const Room room{sms, kGpuSms};
  const uint64_t bytes_a_peer = sentinel_region(layout_of(shape).total_bytes, shape).bytes_a_peer;
  uint32_t last[2] = {PUTGET_PATH_NONE, PUTGET_PATH_NONE};
  for (const uint32_t tokens : kTokens) {
    const bool sent = is_sent_rows(shape, PUTGET_SENTINEL_BY_RULE, tokens, bytes_a_peer, sms < kGpuSms ? sms : 0);
    const putget_launch dispatch = choose_dispatch(shape, tokens, Half::kBoth, room, putget_launch{});
    const putget_launch combine =
        choose_combine(shape, {tokens, 0, Half::kBoth, sent, false, false, false}, room, putget_launch{}).launch;
    if (dispatch.path == last[0] && combine.path == last[1]) continue;
    std::printf("%u %u %u", ep_size, sms, tokens);
    for (const putget_launch& launch : {dispatch, combine}) {
      std::printf(" %u %u %u", launch.path, launch.blocks, launch.threads);
    }
    std::printf("\n");
    last[0] = dispatch.path;
    last[1] = combine.path;
  }
}

}  // namespace

int main() {
  for (const uint32_t ep_size : {1u, 2u, 4u, 8u, 32u}) {
    for (const uint32_t sms : {kGpuSms, 16u}) print_row(ep_size, sms);
  }
}
