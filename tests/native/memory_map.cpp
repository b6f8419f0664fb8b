// Prints the map of one rank's symmetric memory for an example, as the table that docs/protocol.md shows.
#include <cinttypes>
#include <cstdio>

#include "protocol/round/layout.h"

namespace {

using putget::Layout;
using putget::Shape;

// A region that layout.h adds must be added to the table below.
static_assert(sizeof(Layout) == (3 + 2 + putget::kMaxPayloads + 5) * sizeof(uint64_t), "the table misses a region");

// DeepSeek-V3 over 8 ranks: FP8 rows with one float32 scale per 128 values, BF16 output.
Shape example() {
  Shape shape{};
  shape.ep_size = 8;
  shape.num_experts = 256;
  shape.top_k = 8;
  shape.max_tokens_per_rank = 512;
  shape.num_payloads = 2;
  shape.row_bytes[0] = 7168;
  shape.row_bytes[1] = 56 * 4;
  shape.output_elements = 7168;
  shape.output_type = putget::OutputType::kBFloat16;
  return shape;
}

void print(const char* region, const char* indexed_by, uint64_t offset, uint64_t row_bytes, uint64_t rows) {
  std::printf("| %s | %s | %" PRIu64 " | %" PRIu64 " | %" PRIu64 " |\n", region, indexed_by, offset, row_bytes,
              row_bytes * rows);
}

}  // namespace

int main() {
  const Shape shape = example();
  const Layout layout = putget::layout_of(shape);
  const uint64_t ranks = shape.ep_size;
  const uint64_t slots = uint64_t{shape.max_tokens_per_rank} * ranks;
  std::printf("| region | indexed by | first byte | bytes of one | bytes of all |\n|---|---|---:|---:|---:|\n");
  print("`ended`", "peer", layout.ended, putget::kLineBytes, ranks);
  print("`finished`", "peer", layout.finished, putget::kLineBytes, ranks);
  print("`arrived`", "src, part", layout.arrived, putget::kPartsBytes, ranks);
  print("`topk_ids`", "slot, src", layout.topk_ids, shape.top_k * sizeof(int32_t), slots);
  print("`topk_weights`", "slot, src", layout.topk_weights, shape.top_k * sizeof(float), slots);
  print("`payload[0]`", "slot, src", layout.payload[0], shape.row_bytes[0], slots);
  print("`payload[1]`", "slot, src", layout.payload[1], shape.row_bytes[1], slots);
  print("`stats`", "src", layout.stats, shape.num_stats * sizeof(int32_t), ranks);
  print("`output`", "slot, src", layout.output, shape.output_row_bytes(), slots);
  print("`sentinel`", "peer", layout.sentinel, putget::sentinel_region(layout.total_bytes, shape).bytes_a_peer, ranks);
  std::printf("| end | | %" PRIu64 " | | |\n", layout.total_bytes);
}
