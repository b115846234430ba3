// Hopper instructions that CUDA C++ has no names for (barriers in shared memory, bulk copies, tensor cores) and packed
// halves.
// BF16 (0 or 1) is defined by the host. Sources: PTX ISA 8.x, sections "mbarrier", "cp.async.bulk.tensor", "wgmma".
#pragma once
#if BF16
#define HALF "bf16"
#else
#define HALF "f16"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// ---- barriers and copies

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

// This and `copy` are executed by a whole warp, converged, and done by one lane: only so does the compiler keep their
// operands in uniform registers.
__device__ __forceinline__ void arrive_expect(u32 barrier, u32 bytes) {
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, -1;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_if(u32 barrier, u32 does) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
      "r"(does) : "memory");
}

struct alignas(64) Map { u64 opaque[16]; };  // CUtensorMap

__device__ __forceinline__ void prefetch(const Map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One box of (row, token, column); beyond the tensor come zeros.
__device__ __forceinline__ void copy(u32 to, const Map& map, u32 barrier, int column, int token, int row) {
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, -1;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      "\n}\n"
      ::"r"(to), "l"(&map), "r"(column), "r"(token), "r"(row), "r"(barrier) : "memory");
}

// ---- tensor cores

// d (64 x 128, 64 x 64) = or += a' b over 16 tokens, both read where the stage lies.
__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." HALF "." HALF " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." HALF "." HALF " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses of the accumulators past this point.
template <int COUNT> __device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) asm volatile("" : "+f"(d[k])::"memory");
}

// Tokens x elements, elements contiguous (MN-major), 128-byte swizzle; 8 tokens are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 low) { return ((u64)0x40000040u << 32) | low; }

// Lane 4 g + q holds two pairs of row g's elements. Rows 0..7 of `a` are the first, 8..15 the second, the columns of b
// the one in `column`: of the 16 x 8 result half is of use, rows 0..7 for the first pair, 8..15 for the second. (With
// zeros in place of the useless half the operands would have to be moved into neighbouring registers.)
__device__ __forceinline__ void gram_step(float (&d)[4], u32 first, u32 second, u32 column) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32." HALF "." HALF ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(first), "r"(second), "r"(column));
}

// ---- halves, shared memory

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
#else
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
#endif
  return pair;
}

__device__ __forceinline__ void unpack(u32 pair, float& low, float& high) {
#if BF16
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
#else
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
      : "=f"(low), "=f"(high) : "r"(pair));
#endif
}

struct Four { u32 v[4]; };

__device__ __forceinline__ Four load4(u32 address) {
  Four x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3]) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void load4_if(Four& x, u32 address, u32 does) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
               : "+r"(x.v[0]), "+r"(x.v[1]), "+r"(x.v[2]), "+r"(x.v[3]) : "r"(address), "r"(does) : "memory");
}

__device__ __forceinline__ void store4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store4_if(u32 address, u32 a, u32 b, u32 c, u32 d, u32 does) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}\n"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d), "r"(does) : "memory");
}

__device__ __forceinline__ float load_weight(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Pair COUNT / 4 h + j of a thread: row g + 8 h, columns 8 j + 2 q + (0, 1) of its warp's 16 x (2 COUNT).
template <int COUNT> __device__ __forceinline__ u32 pair_of(const float (&acc)[COUNT], int p) {
  constexpr int J = COUNT / 4;
  return pack(acc[p % J * 4 + p / J * 2], acc[p % J * 4 + p / J * 2 + 1]);
}

// Four lanes' four registers, transposed.
__device__ __forceinline__ void transpose4(u32 (&p)[4], u32 q) {
  const bool odd = q & 1, high = q & 2;
  u32 a = __shfl_xor_sync(0xffffffffu, odd ? p[0] : p[1], 1);
  u32 b = __shfl_xor_sync(0xffffffffu, odd ? p[2] : p[3], 1);
  if (odd) { p[0] = a; p[2] = b; } else { p[1] = a; p[3] = b; }
  a = __shfl_xor_sync(0xffffffffu, high ? p[0] : p[2], 2);
  b = __shfl_xor_sync(0xffffffffu, high ? p[1] : p[3], 2);
  if (high) { p[0] = a; p[1] = b; } else { p[2] = a; p[3] = b; }
}
