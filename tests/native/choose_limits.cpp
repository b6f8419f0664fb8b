// The rule of launches at the ends of what its arguments may be: it ends, divides by nothing, and counts items in 32
// bits.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "choose.cpp"

namespace {

using namespace putget;

void require(bool holds, const char* what, const Shape& shape, uint32_t tokens, const putget_launch& launch) {
  if (holds) return;
  std::printf("%s: %u ranks, %u payloads of %u bytes, %u tokens; blocks %u, threads %u, segments of %u, splits %u\n",
              what, shape.ep_size, shape.num_payloads, shape.row_bytes[0], tokens, launch.blocks, launch.threads,
              launch.segment_bytes, launch.splits);
  std::exit(1);
}

Shape shape_of(uint32_t ep_size, uint32_t payloads, uint32_t row_bytes, WireType wire) {
  Shape shape{};
  shape.ep_size = ep_size;
  shape.num_experts = 256;
  shape.top_k = kMaxTopK;
  shape.max_tokens_per_rank = (1u << 22) - 1;
  shape.num_payloads = payloads;
  for (uint32_t p = 0; p < payloads; ++p) shape.row_bytes[p] = row_bytes;
  shape.output_elements = row_bytes / sizeof(float) / 16 * 16 + 16;
  shape.output_type = OutputType::kFloat32;
  shape.wire_type = wire;
  return shape;
}

void check_whole(const Shape& shape, uint32_t tokens, const putget_launch& launch, uint64_t items) {
  require(launch.blocks >= 1 && launch.blocks <= kMaxParts, "blocks", shape, tokens, launch);
  require(launch.threads >= 32 && launch.threads <= kMostThreads, "threads", shape, tokens, launch);
  require(launch.segment_bytes >= 512 && launch.segment_bytes % 512 == 0, "segments", shape, tokens, launch);
  require(launch.splits >= 1 && (launch.splits & (launch.splits - 1)) == 0, "splits", shape, tokens, launch);
  require(items < kMaxItems, "items", shape, tokens, launch);
}

void check(const Shape& shape, uint32_t tokens, const Room& room, const putget_launch& tuning) {
  const putget_launch dispatch = choose_dispatch(shape, tokens, Half::kBoth, room, tuning);
  const uint64_t segments = segments_of_token(shape, dispatch.segment_bytes, false);
  check_whole(shape, tokens, dispatch, tokens * segments * dispatch.splits);
  DispatchCall call{};
  call.num_tokens = tokens;
  cut_into_items(call, shape, dispatch.segment_bytes, dispatch.splits, dispatch.blocks, false);
  const uint64_t cut = uint64_t{call.items_of_block} * dispatch.blocks + call.blocks_with_more;
  require(cut == tokens * segments * dispatch.splits, "items of blocks", shape, tokens, dispatch);
  for (const bool outside : {false, true}) {
    const putget_launch got =
        choose_combine(shape, {tokens, 0, Half::kBoth, false, outside, false, false}, room, tuning).launch;
    const uint64_t segments = (shape.output_row_bytes() + got.segment_bytes - 1) / got.segment_bytes;
    check_whole(shape, tokens, got, tokens * segments);
  }
  for (const uint32_t busiest : {0u, 1u, (1u << 22) - 1}) {
    for (const bool sums : {false, true}) {
      const CombineBatch batch{tokens, busiest, Half::kBoth, true, sums, false, sums};
      const CombineChoice sent = choose_combine(shape, batch, room, tuning);
      require(sent.sending_blocks >= 1 && sent.sending_blocks <= sent.launch.blocks, "senders", shape, tokens,
              sent.launch);
      require(sent.first_summing < sent.launch.blocks, "first that sums", shape, tokens, sent.launch);
    }
  }
}

// A rank with few tokens sends its peers' rows with as many CTAs as they need, where it is told or has none itself.
void check_unequal(const Shape& shape, const Room& room) {
  const auto launch = [&](uint32_t tokens, uint32_t busiest) {
    return choose_combine(shape, {tokens, busiest, Half::kBoth, true, false, false, false}, room, {}).launch;
  };
  const putget_launch equal = launch(128, 0);
  for (const putget_launch& one : {launch(1, 128), launch(0, 128), launch(128, 1)}) {
    require(one.blocks == equal.blocks && one.senders == equal.senders, "unequal batches", shape, 1, one);
  }
  const putget_launch idle = launch(0, 0);
  const putget_launch full = launch(shape.max_tokens_per_rank, 0);
  require(idle.blocks == full.blocks && idle.senders == full.senders, "an idle rank", shape, 0, idle);
}

}  // namespace

int main() {
  for (uint32_t ep_size : {1u, 8u, kMaxRanks}) {
    for (uint32_t payloads : {1u, kMaxPayloads}) {
      for (uint32_t row_bytes : {1u, 7168u, 1u << 26}) {
        for (uint32_t tokens : {0u, 1u, 1900000u, (1u << 22) - 1}) {
          for (uint32_t sms : {1u, 132u}) {
            for (uint32_t splits : {0u, 1u, 128u}) {
              for (uint32_t segment : {0u, 512u, 1u << 26}) {
                for (WireType wire : {WireType::kSame, WireType::kFp8}) {
                  check(shape_of(ep_size, payloads, row_bytes, wire), tokens, {sms, 132},
                        putget_launch{0, 0, segment, splits, 0, 0});
                }
              }
            }
          }
        }
      }
    }
  }
  for (WireType wire : {WireType::kSame, WireType::kFp8}) check_unequal(shape_of(8, 1, 7168, wire), {132, 132});
  std::printf("ok\n");
}
