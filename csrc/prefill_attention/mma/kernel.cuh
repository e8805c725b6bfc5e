// Prefill with mma.sync and cp.async: right on every card from sm_80 on, for every head_dim, tile and KV
// dtype. 64 rows a CTA, 16 a warp; blocks of 64 keys from the last to the first, two stages.
#pragma once

#include "../../common/layout.cuh"
#include "softmax.cuh"

namespace bicl::prefill::mma {

constexpr int kRows = 64;
constexpr int kKeys = 64;
constexpr int kThreads = 128;

template <int D>
struct Config {
  static constexpr int kTile = D % 64 == 0 ? 64 : 32;  // dims of a tile in shared memory, whatever the pool's
  static constexpr int kBytes = kKeys * D * 2;         // one stage of K or V; also Q
  // D = 256 with two stages would not fit the 99 KB of sm_86 and sm_89.
  static constexpr int kStages = D > 128 ? 1 : 2;
  static constexpr int kMapOffset = kBytes * (1 + 2 * kStages);
  static constexpr int kSharedBytes = kMapOffset + 2 * 8 * (D / 8) * 4;  // KeyMap of 16-bit elements
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a [D / kTile][64][kTile] image.
template <int D>
__device__ __forceinline__ int image_offset(int row, int chunk) {
  constexpr int kRowBytes = Config<D>::kTile * 2, kChunks = kRowBytes / 16;
  return (chunk / kChunks) * (64 * kRowBytes) + row * kRowBytes +
         swizzle_chunk(row, chunk % kChunks, kRowBytes) * 16;
}

// Where a block's 16-byte chunks lie in the pool. A page is cut in halves of 32 tokens: a half lies in one page
// and one token tile whatever their sizes, so what remains is a table that never changes.
template <typename KV, int D>
struct KeyMap {
  static constexpr int kChunks = D * int(sizeof(KV)) / 16;
  int offset[2][8][kChunks];  // bytes within a plane: [half][row % 8][chunk]

  __device__ __forceinline__ void fill(const Pages& pages) {
    for (int i = threadIdx.x; i < 2 * 8 * kChunks; i += kThreads) {
      const int chunk = i % kChunks, row = i / kChunks % 8, half = i / (8 * kChunks);
      const int token = half * 32 % pages.page_size + row;
      offset[half][row][chunk] =
          plane_chunk_offset(token, chunk, pages.page_size, pages.tile, D, int(sizeof(KV)));
    }
  }
};

// The two halves' page ids of one block of keys; 0 where there is none.
__device__ __forceinline__ int2 read_page_ids(const PrefillParams& p, const PrefillTile& tile, int block) {
  const int32_t* table = p.sequences.page_table + tile.sequence * p.sequences.page_table_stride;
  const int key = block * kKeys, shift = p.pages.page_size == 64 ? 6 : 5;
  return {key >= 0 && key < tile.key_len ? __ldg(table + (key >> shift)) : 0,
          key >= 0 && key + 32 < tile.key_len ? __ldg(table + ((key + 32) >> shift)) : 0};
}

template <typename E, typename KV>
__device__ __forceinline__ void widen(const uint4& raw, uint4 (&wide)[2]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    constexpr auto kKind = std::is_same_v<KV, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i & 1)));
    const __half2 half = __half2(__nv_cvt_fp8x2_to_halfraw2(two, kKind));
    if constexpr (std::is_same_v<E, __half>) {
      out[i] = reinterpret_cast<const uint32_t&>(half);
    } else {
      const float2 f = __half22float2(half);
      out[i] = ptx::pack(f.x, f.y, E{});
    }
  }
  wide[0] = make_uint4(out[0], out[1], out[2], out[3]);
  wide[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

// K (plane 0) or V (plane 1) of one block to an image in shared memory; rows beyond the keys become zeros.
template <typename E, typename KV, int D>
__device__ __forceinline__ void load_keys(const PrefillParams& p, const PrefillTile& tile, const KeyMap<KV, D>& map,
                                          int head, int plane, int block, int2 ids, char* target) {
  constexpr int kChunks = KeyMap<KV, D>::kChunks;
  constexpr int kBatch = 4;  // loads in flight a thread
  const char* plane_base = static_cast<const char*>(p.pages.data) + plane * plane_bytes(p.pages);
  const char* low = plane_base + head_page_offset(p.pages, ids.x, head);
  const char* high = plane_base + head_page_offset(p.pages, ids.y, head);
  const int rows = tile.key_len - block * kKeys;
  const int eight_rows = 8 * p.pages.tile * int(sizeof(KV));
  auto source_of = [&](int i) {
    const int row = i / kChunks, chunk = i % kChunks, half = row / 32;
    return (half == 0 ? low : high) + map.offset[half][row % 8][chunk] + row % 32 / 8 * eight_rows;
  };
  if constexpr (sizeof(KV) == 2) {
#pragma unroll
    for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads)
      ptx::cp_async_16(ptx::smem_address(target) + image_offset<D>(i / kChunks, i % kChunks), source_of(i),
                       i / kChunks < rows);
  } else {
#pragma unroll 1
    for (int first = threadIdx.x; first < kKeys * kChunks; first += kThreads * kBatch) {
      uint4 raw[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kThreads;
        raw[j] = i < kKeys * kChunks && i / kChunks < rows ? __ldg(reinterpret_cast<const uint4*>(source_of(i)))
                                                           : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kThreads;
        if (i >= kKeys * kChunks) break;
        uint4 wide[2];
        widen<E, KV>(raw[j], wide);
        *reinterpret_cast<uint4*>(target + image_offset<D>(i / kChunks, 2 * (i % kChunks))) = wide[0];
        *reinterpret_cast<uint4*>(target + image_offset<D>(i / kChunks, 2 * (i % kChunks) + 1)) = wide[1];
      }
    }
  }
}

template <typename E, int D>
__device__ __forceinline__ void load_query(const PrefillParams& p, const PrefillTile& tile, int head, uint32_t target) {
  constexpr int kChunks = D / 8;
  const E* query = static_cast<const E*>(p.query);
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const RowPlace place = row_place(p, tile.row + row);
    const bool valid = place.token < tile.query_len && chunk * 8 < p.head_dim;
    const E* source = query;
    if (valid)
      source += (tile.query_start + place.token) * p.query_token_stride +
                (head * static_cast<int64_t>(p.group.divisor) + place.head) * p.query_head_stride + chunk * 8;
    ptx::cp_async_16(target + image_offset<D>(row, chunk), source, valid);
  }
}

// s[16 rows x 64 keys] = Q K^T for this warp's rows.
template <typename E, int D>
__device__ __forceinline__ void multiply_qk(float (&s)[32], uint32_t query, uint32_t key) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (float& x : s) x = 0.f;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, query + image_offset<D>(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, key + image_offset<D>(n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      ptx::mma_16816(reinterpret_cast<float(&)[4]>(s[8 * n]), a, {b[0], b[1]}, E{});
      ptx::mma_16816(reinterpret_cast<float(&)[4]>(s[8 * n + 4]), a, {b[2], b[3]}, E{});
    }
  }
}

// o[16 rows x D] += P V.
template <typename E, int D>
__device__ __forceinline__ void multiply_pv(float (&o)[D / 2], const uint32_t (&probabilities)[16], uint32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    const auto& a = reinterpret_cast<const uint32_t(&)[4]>(probabilities[4 * k]);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, value + image_offset<D>(k * 16 + lane % 16, 2 * n + lane / 16));
      ptx::mma_16816(reinterpret_cast<float(&)[4]>(o[8 * n]), a, {b[0], b[1]}, E{});
      ptx::mma_16816(reinterpret_cast<float(&)[4]>(o[8 * n + 4]), a, {b[2], b[3]}, E{});
    }
  }
}

template <typename E, typename KV, int D>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kBytes = Config<D>::kBytes, kStages = Config<D>::kStages;
  ptx::grid_dependency_wait();
  const int entry = blockIdx.x / (kPrefillRows / kRows), head = blockIdx.y;
  if (entry >= p.plan.header->num_tiles) return;
  PrefillTile tile = p.plan.tiles[entry];
  tile.row += blockIdx.x % (kPrefillRows / kRows) * kRows;
  if (row_place(p, tile.row).token >= tile.query_len) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = tile.row + warp * 16 + lane / 4;
  const ScoreScale scale(p);
  const float lazy = kLazyLog2 / scale.log2_scale;
  const RowKeys keys(p, tile, row);
  const TileKeys bounds(p, tile, kRows);
  const uint32_t query = ptx::smem_address(shared);
  auto key_stage = [&](int stage) { return kBytes * (1 + 2 * stage); };
  auto value_stage = [&](int stage) { return kBytes * (2 + 2 * stage); };
  auto& map = *reinterpret_cast<KeyMap<KV, D>*>(shared + Config<D>::kMapOffset);
  map.fill(p.pages);
  auto load = [&](int plane, int block, int stage, int2 ids) {
    const int offset = plane == 0 ? key_stage(stage) : value_stage(stage);
    load_keys<E, KV, D>(p, tile, map, head, plane, block, ids, shared + offset);
  };

  float o[D / 2];
#pragma unroll
  for (float& x : o) x = 0.f;
  Softmax softmax;
  // Whole tiles only: this path is planned without splits.
  const int first = tile.block_begin * (kPrefillKeys / kKeys);
  const int last = min(tile.block_end * (kPrefillKeys / kKeys), (bounds.end + kKeys - 1) / kKeys);
  load_query<E, D>(p, tile, head, query);
  int2 ids = read_page_ids(p, tile, last - 1);
  __syncthreads();  // the map
  if (first < last) load(0, last - 1, 0, ids);
  ptx::cp_async_commit();
  if (first < last) load(1, last - 1, 0, ids);
  ptx::cp_async_commit();

  int stage = 0;
  for (int block = last - 1; block >= first; --block) {
    ids = read_page_ids(p, tile, block - 1);
    ptx::cp_async_wait<1>();  // all but this block's V
    __syncthreads();
    float s[32];
    multiply_qk<E, D>(s, query, query + key_stage(stage));
    const int next_stage = (stage + 1) % kStages;
    if (kStages == 1) __syncthreads();  // K is overwritten below
    if (block > first) load(0, block - 1, next_stage, ids);
    ptx::cp_async_commit();
    if (scale.cap_scale != 0.f) cap_scores(s, scale.cap_scale);
    if (block * kKeys + kKeys > bounds.all_end || block * kKeys < bounds.all_begin)
      mask_scores<true>(s, keys, block * kKeys + 2 * (lane % 4));
    float factor[2];
    softmax.update(s, scale.log2_scale, lazy, factor);
    rescale(o, factor);
    uint32_t probabilities[16];
    pack_probabilities<E>(probabilities, s);
    ptx::cp_async_wait<1>();  // all but the next K
    __syncthreads();
    multiply_pv<E, D>(o, probabilities, query + value_stage(stage));
    if (kStages == 1) __syncthreads();
    if (block > first) load(1, block - 1, next_stage, ids);
    ptx::cp_async_commit();
    stage = next_stage;
  }

  softmax.finish();
  const float inverse[2] = {softmax.inverse(0, p.pages.v_scale), softmax.inverse(1, p.pages.v_scale)};
  store_rows<E>(p, tile, head, row, 0, o, inverse);
  const float lse[2] = {softmax.lse(0, scale.log2_scale), softmax.lse(1, scale.log2_scale)};
  store_lse(p, tile, head, row, lse);
}

}  // namespace bicl::prefill::mma
