// Inline assembly of matrix products on Hopper: the tensor cores' warpgroup instructions, the bulk tensor copy engine
// and barriers in shared memory. One named function each. sm_90a only.
#pragma once

#include <cstdint>

namespace putget::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barrier_init, before the copy engine uses a barrier.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Counts one arrival of this thread when all of its earlier copy_async have come.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// May wait a while in hardware.
__device__ __forceinline__ bool barrier_done(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_done(barrier, parity)) {
  }
}

// Four bytes of global memory into shared memory.
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// 16 bytes likewise, not kept in L1.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared::cta.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at (column, row) of a tensor of two dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, uint32_t column, uint32_t row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The box at (column, 0, 0, group) of a tensor of four dimensions.
__device__ __forceinline__ void copy_box_of_groups(uint32_t to, const void* map, uint32_t column, uint32_t group,
                                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier)
      : "memory");
}

template <uint32_t kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Before the first product after registers of its sums were written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `kLeft` groups of products are under way.
template <uint32_t kLeft>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// No instruction: keeps the compiler from moving an access of `value` over products that it does not see.
__device__ __forceinline__ void keep_here(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// d [64, 128] float32, the part of this thread, = (add ? d : 0) + a times the transpose of b. a and b describe shared
// memory: 64 and 128 rows of 32 bytes of E4M3.
__device__ __forceinline__ void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, uint32_t add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.u32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63"
      "}, %64, %65, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(add));
}

// d [64, 16] float32, likewise; b has 16 rows.
__device__ __forceinline__ void multiply_e4m3(float (&d)[8], uint64_t a, uint64_t b, uint32_t add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.u32 add, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(add));
}

// Before the copy engine reads global memory that this thread wrote, or has seen written.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Before products of what other threads have copied into shared memory by themselves.
__device__ __forceinline__ void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of some of a block's warps.
template <uint32_t kNumber, uint32_t kThreads>
__device__ __forceinline__ void barrier_of_warps() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

}  // namespace putget::ptx
