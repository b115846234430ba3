// Weight gradient and Gram in one kernel for Hopper (sm_90a).
//
// A program makes a 128 x 128 tile of y_r' x_r row after row over all tokens. One warp of the producer warpgroup brings
// y and x by bulk copies into a ring; two consumer warpgroups hold 64 x 128 each (of the half tiles that end the work,
// 64 x 64). Finished rows wait as packed halves:
// the first SHARED in shared memory, the last KEPT in registers. The products of the rows are made by the tensor cores
// (mma.sync with the R <= 8 rows as both operands), the weighted sum by each thread on its own elements. Each program
// keeps its own slot, so nothing depends on the order in which they run.
//
// Defined by the host (fused.py): R, BF16, STAGES, FIRST, READ_TOTAL, WRITE_TOTAL.
#include "hopper.cuh"

constexpr int SIDE = 128;
constexpr int DEPTH = 32;  // tokens of one stage
constexpr int STRIP = 4;   // tile rows walked together, so that x is found in the second-level cache
constexpr int KEPT = R < 4 ? R : 4;
constexpr int SHARED = R - KEPT;
constexpr int BOX_BYTES = 64 * DEPTH * 2;
constexpr int STAGE_BYTES = 4 * BOX_BYTES;   // y left, y right, x left, x right
constexpr int SLOT_BYTES = SIDE * SIDE * 2;  // one row's tile; [chunk 8][warp 8][piece 32][16]
constexpr int CHUNK_BYTES = 4096;
constexpr int HELD = STAGES * STAGE_BYTES;
constexpr int BARRIERS = HELD + 4 * SLOT_BYTES;
constexpr int WEIGHTS = BARRIERS + 128;
constexpr int SCRATCH = WEIGHTS + 32;  // [warp 8][65] float
static_assert(2 * STAGES * 8 <= 128 && SCRATCH + 8 * 65 * 4 <= 232448, "shared memory");
static_assert(R >= 1 && R <= 8, "rows");
constexpr int COUNT = R * (R + 1) / 2 + 1;

struct Args {
  const float* weights;
  void* grad;
  float* total;
  double* slots;
  int T, o, i, slot_stride, width;
};

extern __shared__ __align__(1024) unsigned char shared_memory[];

// ---- the walk over the tiles, the same in every thread

struct Walk {
  int down, right, whole, items;  // items from `whole` on are half tiles of 64 rows
  __device__ __forceinline__ Walk(int o, int i, int programs) {
    down = (o + SIDE - 1) / SIDE;
    right = (i + SIDE - 1) / SIDE;
    const int tiles = down * right;
    const int left = tiles % programs;
    const bool split = 2 * left <= programs;  // the last round, where only halves keep all multiprocessors busy
    whole = split ? tiles - left : tiles;
    items = split ? tiles + left : tiles;
  }
  // First row and column of a tile; true for half a tile.
  __device__ __forceinline__ bool place(int item, int& row, int& column) const {
    const bool half = item >= whole;
    const int tile = half ? whole + (item - whole) / 2 : item;
    const int strip = tile / (STRIP * right);
    const int height = min(down - strip * STRIP, STRIP);
    const int inside = tile - strip * STRIP * right;
    row = (strip * STRIP + inside % height) * SIDE + (half ? (item - whole) % 2 * (SIDE / 2) : 0);
    column = inside / height * SIDE;
    return half;
  }
};

struct Position {
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- producer

__device__ __forceinline__ void produce(
    const Map& y, const Map& x, const Walk& walk, u32 ring, u32 full, u32 empty, int T) {
  prefetch(y);
  prefetch(x);
  Position at{0, 1};
  for (int item = blockIdx.x; item < walk.items; item += gridDim.x) {
    int row, column;
    const bool half = walk.place(item, row, column);
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
#pragma unroll 1
      for (int t = 0; t < T; t += DEPTH) {
        const u32 filled = full + 8 * at.stage;
        const u32 to = ring + STAGE_BYTES * at.stage;
        wait(empty + 8 * at.stage, at.parity);
        __syncwarp();
        arrive_expect(filled, half ? STAGE_BYTES - BOX_BYTES : STAGE_BYTES);
        copy(to, y, filled, row, t, r);
        if (!half) copy(to + BOX_BYTES, y, filled, row + 64, t, r);
        copy(to + 2 * BOX_BYTES, x, filled, column, t, r);
        copy(to + 3 * BOX_BYTES, x, filled, column + 64, t, r);
        at.next();
      }
    }
  }
}

// ---- consumers

// Where one thread of a consumer warpgroup finds its stages, and whether it gives them back for its warp.
struct Ring {
  u32 full, empty, gives, a_low, b_low;
};

// One row's product; a stage is given back once the product after it has been issued.
template <int N>
__device__ __forceinline__ void row_product(float (&acc)[N / 2], Position& at, int steps, const Ring& ring) {
  u32 last = 0;
  pin(acc);
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    wait(ring.full + 8 * at.stage, at.parity);
    const u32 offset = at.stage * (STAGE_BYTES / 16);
    wgmma_fence();
    wgmma(acc, descriptor(ring.a_low + offset), descriptor(ring.b_low + offset), k > 0);
    wgmma(acc, descriptor(ring.a_low + offset + 128), descriptor(ring.b_low + offset + 128), 1);
    wgmma_commit();
    wgmma_wait<1>();
    if (k > 0) arrive_if(last, ring.gives);
    last = ring.empty + 8 * at.stage;
    at.next();
  }
  wgmma_wait<0>();
  pin(acc);
  arrive_if(last, ring.gives);
}

struct Sums { float gram0, gram1, norm; };

// Chunk c of the weighted sum, a thread's own 8 elements of all rows: to `grad` or, before the last launch, `total`.
template <int N>
__device__ __forceinline__ void weighted_chunk(
    Sums& sums, const Four (&mine)[SHARED > 0 ? SHARED : 1], const u32 (&kept)[KEPT][N / 4], const float (&w)[R],
    const Args& args, int c, int row, int column, u32 lane) {
  const u32 q = lane % 4;
      const int at_row = row + (int)lane / 4 + c / (N / 32) * 8;
      const int at_column = column + c % (N / 32) * 32;
      u32 packed[4];
  #pragma unroll
      for (int e = 0; e < 4; ++e) {
        float low_sum = 0.0f, high_sum = 0.0f;
        [[maybe_unused]] float2* pair = nullptr;
        [[maybe_unused]] bool inside = false;
        if constexpr (READ_TOTAL || WRITE_TOTAL) {
          pair = reinterpret_cast<float2*>(args.total + (long long)at_row * args.i + at_column + 8 * e + 2 * (int)q);
          inside = at_row < args.o && at_column + 8 * e + 2 * (int)q < args.i;
        }
        if constexpr (READ_TOTAL) {
          if (inside) {
            const float2 before = *pair;
            low_sum = before.x;
            high_sum = before.y;
          }
        }
  #pragma unroll
        for (int n = 0; n < R; ++n) {
          float low, high;
          unpack(n < SHARED ? mine[n < SHARED ? n : 0].v[e] : kept[n < SHARED ? 0 : n - SHARED][4 * c + e], low, high);
          low_sum = __fmaf_rn(low, w[n], low_sum);
          high_sum = __fmaf_rn(high, w[n], high_sum);
        }
        if constexpr (WRITE_TOTAL) {
          if (inside) *pair = float2{low_sum, high_sum};
        } else {
          sums.norm = __fmaf_rn(high_sum, high_sum, __fmaf_rn(low_sum, low_sum, sums.norm));
          packed[e] = pack(low_sum, high_sum);
        }
      }
      if constexpr (!WRITE_TOTAL) {
        transpose4(packed, q);  // lane q: columns 8 q .. 8 q + 7 of 32
        if (at_row < args.o && at_column + 8 * (int)q < args.i) {  // a branch: without, ptxas mixes chunks and spills
          u16* to = static_cast<u16*>(args.grad) + ((long long)at_row * args.i + at_column + 8 * (int)q);
          asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(packed[0]), "r"(packed[1]),
                       "r"(packed[2]), "r"(packed[3]) : "memory");
        }
      }
}

// The products of the rows of one tile, their weighted sum and its square norm; `row` is the warp's first of 16.
template <int N>
__device__ __forceinline__ void finish_tile(
    Sums& sums, const u32 (&kept)[KEPT][N / 4], u32 held, u32 weights, const Args& args, int row, int column, u32 warp,
    u32 lane) {
  const u32 g = lane / 4, q = lane % 4;
  // Row n waits in slot n % 4. A slot's pieces lie by the lane that wrote them, in odd slots with pieces 4..7 of 8
  // first: conflict-free for the writers and for the lanes (g, q) below, of which eight, one 128-byte access, take two
  // rows.
  const u32 own = held + warp * 512;
  const u32 even = own + lane * 16, odd = own + (lane ^ 4) * 16;
  // Lane (g, q) takes piece 4 j + q of row g, out of the row's slot or of the one lent to a row of the registers. They
  // are lent the chunk before, which is done with, and in the first chunk the place of what has just been read.
  const u32 read0 = own + g % 4 * SLOT_BYTES + q * 16 + g % 2 * 64, read1 = read0 ^ 64;
  [[maybe_unused]] const u32 first = (int)g < SHARED, second = (int)g >= SHARED && g < R;
  [[maybe_unused]] const u32 shift = second ? CHUNK_BYTES : 0;
  float w[R];
#pragma unroll
  for (int n = 0; n < R; ++n) w[n] = load_weight(weights + 4 * n);
  float d[4][4];
#pragma unroll
  for (int k = 0; k < 16; ++k) d[k / 4][k % 4] = 0.0f;
  __syncwarp();
#pragma unroll
  for (int c = 0; c < N / 16; ++c) {
    const u32 chunk = c * CHUNK_BYTES;
    Four mine[SHARED > 0 ? SHARED : 1];
#pragma unroll
    for (int n = 0; n < SHARED; ++n) mine[n] = load4((n % 2 ? odd : even) + n * SLOT_BYTES + chunk);
    const u32 lent = SHARED == 0 || c == 0 ? chunk : chunk - CHUNK_BYTES;  // where rows of the registers go
    const bool in_place = SHARED > 0 && c == 0;
    if (!in_place) {
      __syncwarp();  // the chunk before has been read
#pragma unroll
      for (int n = 0; n < KEPT; ++n)
        store4(((SHARED + n) % 2 ? odd : even) + (SHARED + n) % 4 * SLOT_BYTES + lent, kept[n][4 * c],
               kept[n][4 * c + 1], kept[n][4 * c + 2], kept[n][4 * c + 3]);
      __syncwarp();
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {  // the pieces of lanes 0..15, then of 16..31
      Four all[4];
      if (in_place) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          all[j] = Four{{0, 0, 0, 0}};
          load4_if(all[j], (j % 2 ? read1 : read0) + (2 * side + j / 2) * 128, first);
        }
        __syncwarp();  // read before the rows of the registers overwrite it
#pragma unroll
        for (int n = 0; n < KEPT; ++n)
          store4_if(((SHARED + n) % 2 ? odd : even) + (SHARED + n) % 4 * SLOT_BYTES, kept[n][0], kept[n][1],
                    kept[n][2], kept[n][3], side == 0 ? lane < 16 : lane >= 16);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) load4_if(all[j], (j % 2 ? read1 : read0) + (2 * side + j / 2) * 128, second);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          all[j] = load4((j % 2 ? read1 : read0) + (2 * side + j / 2) * 128 + chunk - (SHARED > 0 ? shift : 0));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gram_step(d[0], all[j].v[0], all[j].v[1], all[j].v[0]);
        gram_step(d[1], all[j].v[0], all[j].v[1], all[j].v[1]);
        gram_step(d[2], all[j].v[2], all[j].v[3], all[j].v[2]);
        gram_step(d[3], all[j].v[2], all[j].v[3], all[j].v[3]);
      }
    }
    weighted_chunk<N>(sums, mine, kept, w, args, c, row, column, lane);
  }
  // The tensor core's additions truncate: no chain of them is longer than a tile.
  sums.gram0 += (d[0][0] + d[1][2]) + (d[2][0] + d[3][2]);
  sums.gram1 += (d[0][1] + d[1][3]) + (d[2][1] + d[3][3]);
  __syncwarp();  // read before the next tile's rows overwrite it
}

// A row of the warpgroup's tile into its slot of shared memory, out of which `finish_tile` reads.
template <int N>
__device__ __forceinline__ void hold(const float (&acc)[N / 2], u32 held, int r, u32 warp, u32 lane) {
  const u32 to = held + r * SLOT_BYTES + warp * 512 + (lane ^ (r & 1) * 4) * 16;
#pragma unroll
  for (int c = 0; c < N / 16; ++c)
    store4(to + c * CHUNK_BYTES, pair_of(acc, 4 * c), pair_of(acc, 4 * c + 1), pair_of(acc, 4 * c + 2),
           pair_of(acc, 4 * c + 3));
}

// All rows of one warpgroup's 64 x N, whose first element is (row, column).
template <int N>
__device__ __forceinline__ void make_tile(
    Sums& sums, Position& at, int steps, const Ring& ring, u32 base, const Args& args, int row, int column, u32 warp,
    u32 lane) {
  float acc[N / 2];
  if constexpr (SHARED > 0) {
#pragma unroll 1
    for (int r = 0; r < SHARED; ++r) {
      row_product<N>(acc, at, steps, ring);
      hold<N>(acc, base + HELD, r, warp, lane);
    }
  }
  u32 kept[KEPT][N / 4];
#pragma unroll
  for (int r = 0; r < KEPT; ++r) {
    row_product<N>(acc, at, steps, ring);
#pragma unroll
    for (int p = 0; p < N / 4; ++p) kept[r][p] = pair_of(acc, p);
  }
  finish_tile<N>(sums, kept, base + HELD, base + WEIGHTS, args, row + 16 * (int)(warp % 4), column, warp, lane);
}

// 8 warps' sums, in float64, to this program's slot.
__device__ __forceinline__ void put(const Sums& sums, const Args& args, u32 warp, u32 lane) {
  float* scratch = reinterpret_cast<float*>(shared_memory + SCRATCH);
  float norm = sums.norm;
  for (int distance = 16; distance > 0; distance /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, distance);
  scratch[warp * 65 + 2 * lane] = sums.gram0;  // 8 g + 2 q = 2 lane
  scratch[warp * 65 + 2 * lane + 1] = sums.gram1;
  if (lane == 0) scratch[warp * 65 + 64] = norm;
  asm volatile("bar.sync 1, 256;" ::: "memory");
  const int column = threadIdx.x;
  if (column < args.width) {
    int entry = 64, first = 0;
    for (int m = 0; m < R; first += R - m, ++m)
      if (column >= first && column < first + R - m) entry = 8 * m + m + column - first;
    double value = 0.0;
    if (column < COUNT)
      for (int k = 0; k < 8; ++k) value += (double)scratch[k * 65 + entry];
    double* slot = args.slots + (long long)blockIdx.x * args.slot_stride + column;
    *slot = FIRST ? value : *slot + value;
  }
}

__device__ __forceinline__ void consume(const Args& args, const Walk& walk, u32 base, u32 full, u32 empty) {
  const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // to the compiler the same in all lanes
  const u32 lane = threadIdx.x % 32;
  const u32 group = warp / 4;
  // A whole tile: this group's 64 columns of y, all of x. Half a tile: y's only 64 columns, this group's 64 of x.
  const u32 y_low = base / 16 & 0x3fff, x_low = (base + 2 * BOX_BYTES) / 16 & 0x3fff;
  const Ring whole{full, empty, lane == 0, y_low + BOX_BYTES / 16 * group, x_low | (BOX_BYTES / 16) << 16};
  const Ring half{full, empty, lane == 0, y_low, x_low + BOX_BYTES / 16 * group};
  const int steps = (args.T + DEPTH - 1) / DEPTH;
  Position at{0, 0};
  Sums sums{0.0f, 0.0f, 0.0f};
  int item = blockIdx.x, row, column;
#pragma unroll 1
  for (; item < walk.whole; item += gridDim.x) {
    walk.place(item, row, column);
    make_tile<128>(sums, at, steps, whole, base, args, row + 64 * (int)group, column, warp, lane);
  }
  if (item < walk.items) {  // at most one half tile a program
    walk.place(item, row, column);
    make_tile<64>(sums, at, steps, half, base, args, row, column + 64 * (int)group, warp, lane);
  }
  put(sums, args, warp, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1)
weight_gram(const __grid_constant__ Map y, const __grid_constant__ Map x, const __grid_constant__ Args args) {
  const u32 base = shared_address(shared_memory);
  const u32 full = base + BARRIERS, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    if (base % 1024 != 0) asm volatile("trap;");
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 8);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (threadIdx.x < R) reinterpret_cast<float*>(shared_memory + WEIGHTS)[threadIdx.x] = args.weights[threadIdx.x];
  __syncthreads();
  const Walk walk(args.o, args.i, gridDim.x);
  const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8) produce(y, x, walk, base, full, empty, args.T);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(args, walk, base, full, empty);
  }
}
