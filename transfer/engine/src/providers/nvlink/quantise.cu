// Rounds matrices to FP8 (float8_e4m3fn) with a scale for each block of 128 x 128, in one pass over them.
//
// grid: one dimension, a block for each block of each matrix, along a matrix's columns first. Block: 256 threads. Shared
// memory: 1 KiB, static. Two barriers, which all threads meet: the largest magnitude of a block is known before its values
// are scaled. Nothing is shared between blocks, so they may run in any order.
//
// The bytes are those of `putget_transfer.weights.quantise` on a CPU: quotients and roundings are IEEE's, to the nearest,
// ties to even; subnormal numbers are kept.
//
// The engine loads quantise.ptx, which comes from this file by
//   nvcc -ptx -arch=compute_75 -O3 quantise.cu, with `.version 7.0` in its head: nothing newer is used.

struct Blocks {
  // The first element of the first matrix. Strides are in elements.
  unsigned long long source, rows, columns, matrix_stride, row_stride, column_stride;
  // Packed values of a window of each matrix, and packed scales of all blocks; 0: they are not wanted.
  unsigned long long values, first_row, first_column, num_rows, num_columns, scales;
  unsigned long long flags;
};

constexpr unsigned kPowersOfTwo = 1, kAsExponents = 2;
constexpr unsigned kSide = 128, kThreads = 256, kChunk = 8;
constexpr unsigned kChunks = kSide / kChunk;      // of a row
constexpr unsigned kRows = kThreads / kChunks;    // that all threads read at a time
constexpr unsigned kSteps = kSide / kRows;
constexpr unsigned kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
constexpr unsigned kLargest = 0x43e00000;         // 448
constexpr unsigned kLeastNormal = 0x00800000;     // 2 ** -126, of float32
constexpr unsigned kLeastNormalFp8 = 0x3c800000;  // 2 ** -6
constexpr unsigned kSubnormalsFp8 = 141u << 23;   // 2 ** 14: its last bit is that of FP8's subnormal numbers

// The larger of a magnitude and the largest finite one so far.
__device__ unsigned larger(unsigned largest, unsigned bits) {
  const unsigned magnitude = bits & kMagnitude;
  return max(largest, magnitude < kInfinite ? magnitude : 0);
}

__device__ unsigned rounded(unsigned bits, float scale) {
  const unsigned quotient = __float_as_uint(__fdiv_rn(__uint_as_float(bits), scale));
  const unsigned magnitude = quotient & kMagnitude, bounded = min(magnitude, kLargest);
  const unsigned subnormal =
      __float_as_uint(__fadd_rn(__uint_as_float(bounded), __uint_as_float(kSubnormalsFp8))) - kSubnormalsFp8;
  const unsigned normal = (bounded + 0x7ffff + (bounded >> 20 & 1) - (120u << 23)) >> 20;
  const unsigned found = (bounded < kLeastNormalFp8 ? subnormal : normal) | (quotient >> 24 & 0x80);
  return magnitude > kInfinite ? 0x7f : found;
}

// The largest of all threads' numbers.
__device__ unsigned largest_of_all(unsigned largest) {
  __shared__ unsigned all[kThreads];
  const unsigned thread = threadIdx.x;
  all[thread] = largest;
  __syncthreads();
  if (thread < 32) {
    for (unsigned at = thread + 32; at < kThreads; at += 32) largest = max(largest, all[at]);
    all[thread] = largest;
  }
  __syncthreads();
  for (unsigned at = 0; at < 32; ++at) largest = max(largest, all[at]);
  return largest;
}

// The scale of a block, which is stored by one thread.
__device__ float scale_of(const Blocks &job, unsigned largest) {
  unsigned bits = __float_as_uint(1.0f);
  // The quotient of the smallest numbers is 0 or imprecise; the least normal number scales them as well.
  if (largest) bits = max(__float_as_uint(__fdiv_rn(__uint_as_float(largest), 448.0f)), kLeastNormal);
  if (job.flags & kPowersOfTwo && bits & (kLeastNormal - 1)) bits = (bits & kInfinite) + kLeastNormal;
  if (job.scales && threadIdx.x == 0) {
    if (job.flags & kAsExponents) {
      reinterpret_cast<unsigned char *>(job.scales)[blockIdx.x] = static_cast<unsigned char>(bits >> 23);
    } else {
      reinterpret_cast<unsigned *>(job.scales)[blockIdx.x] = bits;
    }
  }
  return __uint_as_float(bits);
}

// A whole block whose rows are aligned: it stays in registers between its two passes.
template <unsigned kBytes>
__device__ void whole_block(const Blocks &job, unsigned long long from, unsigned long long to) {
  constexpr unsigned kVectors = kChunk * kBytes / 16;
  uint4 held[kSteps][kVectors];
#pragma unroll
  for (unsigned step = 0; step < kSteps; ++step) {
#pragma unroll
    for (unsigned at = 0; at < kVectors; ++at) {
      held[step][at] = reinterpret_cast<const uint4 *>(from + step * kRows * job.row_stride * kBytes)[at];
    }
  }
  unsigned largest = 0;
#pragma unroll
  for (unsigned step = 0; step < kSteps; ++step) {
#pragma unroll
    for (unsigned at = 0; at < kVectors; ++at) {
      const uint4 four = held[step][at];
      const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (unsigned word = 0; word < 4; ++word) {
        largest = larger(largest, kBytes == 4 ? words[word] : words[word] & 0xffff0000);
        if (kBytes == 2) largest = larger(largest, words[word] << 16);
      }
    }
  }
  const float scale = scale_of(job, largest_of_all(largest));
  if (!job.values) return;
#pragma unroll
  for (unsigned step = 0; step < kSteps; ++step) {
    unsigned found[2] = {0, 0};
#pragma unroll
    for (unsigned at = 0; at < kVectors; ++at) {
      const uint4 four = held[step][at];
      const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (unsigned word = 0; word < 4; ++word) {
        if (kBytes == 4) {
          found[at] |= rounded(words[word], scale) << (8 * word);
        } else {
          found[word / 2] |= rounded(words[word] << 16, scale) << (word % 2 * 16);
          found[word / 2] |= rounded(words[word] & 0xffff0000, scale) << (word % 2 * 16 + 8);
        }
      }
    }
    *reinterpret_cast<uint2 *>(to + step * kRows * job.num_columns) = make_uint2(found[0], found[1]);
  }
}

template <unsigned kBytes>
__device__ unsigned element(unsigned long long from) {
  if (kBytes == 4) return *reinterpret_cast<const unsigned *>(from);
  return static_cast<unsigned>(*reinterpret_cast<const unsigned short *>(from)) << 16;
}

// Any other block: its second pass reads it again.
template <unsigned kBytes>
__device__ void any_block(const Blocks &job, unsigned long long matrix, unsigned long long row, unsigned long long column) {
  const unsigned long long from = job.source + matrix * job.matrix_stride * kBytes;
  const unsigned long long at_column = column + threadIdx.x % kSide, end_row = min(row + kSide, job.rows);
  const unsigned long long column_from = from + at_column * job.column_stride * kBytes;
  const unsigned long long first = at_column < job.columns ? row + threadIdx.x / kSide : end_row;
  unsigned largest = 0;
#pragma unroll 4
  for (unsigned long long at = first; at < end_row; at += kThreads / kSide) {
    largest = larger(largest, element<kBytes>(column_from + at * job.row_stride * kBytes));
  }
  const float scale = scale_of(job, largest_of_all(largest));
  if (!job.values || at_column < job.first_column || at_column >= job.first_column + job.num_columns) return;
  const unsigned long long to = job.values + at_column - job.first_column;
#pragma unroll 4
  for (unsigned long long at = first; at < end_row; at += kThreads / kSide) {
    if (at < job.first_row || at >= job.first_row + job.num_rows) continue;
    const unsigned found = rounded(element<kBytes>(column_from + at * job.row_stride * kBytes), scale);
    const unsigned long long place = to + (matrix * job.num_rows + at - job.first_row) * job.num_columns;
    *reinterpret_cast<unsigned char *>(place) = static_cast<unsigned char>(found);
  }
}

template <unsigned kBytes>
__device__ void quantise(const Blocks &job) {
  const unsigned wide = static_cast<unsigned>((job.columns + kSide - 1) / kSide);
  const unsigned high = static_cast<unsigned>((job.rows + kSide - 1) / kSide);
  const unsigned long long matrix = blockIdx.x / wide / high;
  const unsigned long long row = blockIdx.x / wide % high * kSide, column = blockIdx.x % wide * kSide;
  const unsigned long long own_row = row + threadIdx.x / kChunks, own_column = column + threadIdx.x % kChunks * kChunk;
  const unsigned long long from =
      job.source + (matrix * job.matrix_stride + own_row * job.row_stride + own_column) * kBytes;
  const unsigned long long to =
      job.values + (matrix * job.num_rows + own_row - job.first_row) * job.num_columns + own_column - job.first_column;
  const bool read = row + kSide <= job.rows && column + kSide <= job.columns && job.column_stride == 1 &&
                    (job.source | job.row_stride * kBytes | job.matrix_stride * kBytes) % 16 == 0;
  const bool written = row >= job.first_row && row + kSide <= job.first_row + job.num_rows &&
                       column >= job.first_column && column + kSide <= job.first_column + job.num_columns &&
                       ((job.values - job.first_column) | job.num_columns) % 8 == 0;
  if (read && (written || !job.values)) {
    whole_block<kBytes>(job, from, to);
  } else {
    any_block<kBytes>(job, matrix, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(256) putget_transfer_quantise_bfloat16(const Blocks job) { quantise<2>(job); }
extern "C" __global__ void __launch_bounds__(256) putget_transfer_quantise_float32(const Blocks job) { quantise<4>(job); }
