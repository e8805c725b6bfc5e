// The tile list of one step, made on the device by one CTA: longest tiles first, keys split where one
// tile would outlast its share of the work.
#include <algorithm>

#include "../common/launch.h"
#include "../common/ptx.cuh"
#include "launch.h"

namespace bicl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 16;  // cost classes; within one, sequences stay together for L2
constexpr int kMinPieceBlocks = 2;
constexpr int kCandidates = 32;  // piece lengths tried, from a CTA's share to three times that
constexpr int64_t kSectionBytes = 24 << 20;  // K and V worked on at a time; L2 is 50 MB

struct Shared {
  int warp_sums[kWarps];
  long long warp_work[kWarps], warp_keys[kWarps];
  int warp_max[kWarps];
  int candidate_pieces[kCandidates];
  int num_splits, num_partials;
  int counts[kThreads * (kBuckets + 1)];  // [bucket][thread], see count_at
  int first_tile[1];                      // [batch + 1]
};

int shared_bytes(int batch) { return static_cast<int>(sizeof(Shared) + sizeof(int) * batch); }

// Counts are scanned kBuckets to a thread: a word of padding after each run keeps the banks apart.
__device__ __forceinline__ int& count_at(Shared& s, int i) { return s.counts[i + i / kBuckets]; }

// Exclusive prefix sum over the block; `total` is the sum.
__device__ int block_exclusive_sum(int value, Shared& s, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) s.warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += s.warp_sums[w];
    total += s.warp_sums[w];
  }
  return before + inclusive - value;
}

// Walks the flat list of tiles: sequences ascending, tiles of a sequence from its end.
struct Cursor {
  const PrefillPlanParams& p;
  const int* first_tile;
  PrefillTile tile;
  int tile_in_sequence;
  int num_tiles;

  __device__ void load(int sequence) {
    tile.sequence = sequence;
    tile.query_start = p.cu_seqlens_q[sequence];
    tile.query_len = p.cu_seqlens_q[sequence + 1] - tile.query_start;
    tile.key_len = max(0, p.cache_seqlens[sequence]);
    num_tiles = first_tile[sequence + 1] - first_tile[sequence];
  }

  __device__ Cursor(const PrefillPlanParams& params, const Shared& s, int flat)
      : p(params), first_tile(s.first_tile) {
    int low = 0, high = p.batch;  // the last sequence that starts at or before `flat`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_tile[middle] <= flat ? low : high) = middle;
    }
    load(low);
    tile_in_sequence = num_tiles - 1 - (flat - first_tile[low]);
    place();
  }

  __device__ void place() {
    tile.row = tile_in_sequence * kPrefillRows;
    const int first = p.group.divide(tile.row);
    const int last = min(static_cast<int>(p.group.divide(tile.row + kPrefillRows - 1)), tile.query_len - 1);
    const int offset = tile.key_len - tile.query_len;
    const int begin = p.window.begin(first + offset);
    const int end = p.window.end(last + offset, tile.key_len);
    tile.block_begin = end > begin ? begin / kPrefillKeys : 0;
    tile.block_end = end > begin ? (end + kPrefillKeys - 1) / kPrefillKeys : 0;
  }

  __device__ int cost() const { return max(1, tile.block_end - tile.block_begin); }

  __device__ void next() {
    if (--tile_in_sequence < 0) {
      int sequence = tile.sequence;
      do {
        if (++sequence >= p.batch) return;
        load(sequence);
      } while (num_tiles == 0);
      tile_in_sequence = num_tiles - 1;
    }
    place();
  }
};

__device__ int scan_tiles_of_sequences(const PrefillPlanParams& p, Shared& s) {
  int carry = 0;
  for (int base = 0; base < p.batch; base += kThreads) {
    const int i = base + threadIdx.x;
    const int rows = i < p.batch ? (p.cu_seqlens_q[i + 1] - p.cu_seqlens_q[i]) * static_cast<int>(p.group.divisor) : 0;
    int total;
    const int before = block_exclusive_sum((max(rows, 0) + kPrefillRows - 1) / kPrefillRows, s, total);
    if (i < p.batch) s.first_tile[i] = carry + before;
    carry += total;
  }
  if (threadIdx.x == 0) s.first_tile[p.batch] = carry;
  __syncthreads();
  return carry;
}

__device__ long long sum_key_tokens(const PrefillPlanParams& p) {
  long long tokens = 0;
  for (int i = threadIdx.x; i < p.batch; i += kThreads) tokens += max(0, p.cache_seqlens[i]);
  return tokens;
}

// Blocks a piece may have; a tile costlier than this is split. kUnlimited: split nothing.
__device__ int piece_blocks(const PrefillPlanParams& p, Shared& s, int tiles, long long work, int max_cost) {
  if (!p.allow_split || tiles == 0) return kUnlimited;
  const int heads = p.num_kv_heads;
  const int share = max(kMinPieceBlocks, static_cast<int>((work * heads + p.num_ctas - 1) / p.num_ctas));
  if (max_cost <= share) return kUnlimited;
  // Tiles fit in one wave: the smallest pieces that still do. Otherwise: no piece above a CTA's share.
  const bool one_wave = tiles * heads <= p.num_ctas;
  if (!one_wave) return share;
  const int step = max(1, (share + 15) / 16);
  if (threadIdx.x < kCandidates) s.candidate_pieces[threadIdx.x] = 0;
  __syncthreads();
  for (int t = threadIdx.x / kCandidates; t < tiles; t += kThreads / kCandidates) {
    const int piece = share + threadIdx.x % kCandidates * step;
    atomicAdd(&s.candidate_pieces[threadIdx.x % kCandidates], (Cursor(p, s, t).cost() + piece - 1) / piece);
  }
  __syncthreads();
  for (int i = 0; i < kCandidates; ++i)
    if (s.candidate_pieces[i] * heads <= p.num_ctas) return share + i * step;
  return kUnlimited;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PrefillPlanParams p) {
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const PrefillPlan& plan = p.plan;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  ptx::grid_dependency_wait();
  for (int i = thread; i < plan.max_partials; i += kThreads) plan.arrived[i] = plan.combined[i] = 0;
  if (thread == 0) s.num_splits = s.num_partials = 0;
  const int tiles = scan_tiles_of_sequences(p, s);

  // Each thread owns a run of consecutive tiles.
  const int run = (tiles + kThreads - 1) / kThreads;
  const int first = min(thread * run, tiles), last = min(first + run, tiles);
  long long work = 0, keys = sum_key_tokens(p);
  int max_cost = 1;
  if (first < last) {
    Cursor cursor(p, s, first);
    for (int t = first; t < last; ++t, cursor.next()) {
      work += cursor.cost();
      max_cost = max(max_cost, cursor.cost());
    }
  }
  max_cost = __reduce_max_sync(~0u, max_cost);
#pragma unroll
  for (int d = 16; d; d /= 2) {
    work += __shfl_xor_sync(~0u, work, d);
    keys += __shfl_xor_sync(~0u, keys, d);
  }
  if (lane == 0) s.warp_work[warp] = work, s.warp_keys[warp] = keys, s.warp_max[warp] = max_cost;
  __syncthreads();
  work = keys = 0;
  for (int w = 0; w < kWarps; ++w) {
    work += s.warp_work[w];
    keys += s.warp_keys[w];
    max_cost = max(max_cost, s.warp_max[w]);
  }
  int piece = piece_blocks(p, s, tiles, work, max_cost);

  // Partials needed; without room for them nothing is split.
  int partials = 0;
  if (piece < kUnlimited && first < last) {
    Cursor cursor(p, s, first);
    for (int t = first; t < last; ++t, cursor.next())
      if (cursor.cost() > piece) partials += (cursor.cost() + piece - 1) / piece;
  }
  int total;
  block_exclusive_sum(partials, s, total);
  if (static_cast<long long>(total) * p.num_kv_heads > plan.max_partials) piece = kUnlimited;

  // Stable counting sort by cost, costliest first. Pieces of a tile stay together.
  const int longest = min(max_cost, piece);
  for (int b = 0; b < kBuckets; ++b) count_at(s, b * kThreads + thread) = 0;
  auto pieces_of = [&](int cost) { return cost > piece ? (cost + piece - 1) / piece : 1; };
  auto bucket_of = [&](int cost) {
    const int each = (cost + pieces_of(cost) - 1) / pieces_of(cost);
    return min(kBuckets - 1, max(0, longest - each) * kBuckets / longest);
  };
  if (first < last) {
    Cursor cursor(p, s, first);
    for (int t = first; t < last; ++t, cursor.next())
      count_at(s, bucket_of(cursor.cost()) * kThreads + thread) += pieces_of(cursor.cost());
  }
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kBuckets; ++i) sum += count_at(s, thread * kBuckets + i);
  int offset = block_exclusive_sum(sum, s, total);
#pragma unroll
  for (int i = 0; i < kBuckets; ++i) {
    int& entry = count_at(s, thread * kBuckets + i);
    const int count = entry;
    entry = offset;
    offset += count;
  }
  __syncthreads();
  if (first < last) {
    Cursor cursor(p, s, first);
    for (int t = first; t < last; ++t, cursor.next()) {
      const int cost = cursor.cost(), pieces = pieces_of(cost);
      int& place = count_at(s, bucket_of(cost) * kThreads + thread);
      PrefillTile tile = cursor.tile;
      tile.split = -1;
      if (pieces == 1) {
        plan.tiles[place++] = tile;
        continue;
      }
      const int index = atomicAdd(&s.num_splits, 1);
      plan.splits[index] = {atomicAdd(&s.num_partials, pieces), pieces, place, 0};
      for (int i = 0; i < pieces; ++i) {
        PrefillTile part = tile;
        part.block_begin = tile.block_begin + cost * i / pieces;
        part.block_end = tile.block_begin + cost * (i + 1) / pieces;
        part.split = i << 16 | index;
        plan.tiles[place++] = part;
      }
    }
  }
  __syncthreads();
  if (thread == 0) {
    int section = p.num_kv_heads;
    while (section > 1 && (p.num_kv_heads % section || keys * p.kv_bytes * section > kSectionBytes)) --section;
    PrefillHeader header = {};
    header.num_tiles = total;
    header.heads_per_section = section;
    header.num_splits = s.num_splits;
    header.work_tickets = total * p.num_kv_heads;
    header.total_tickets =
        header.work_tickets + s.num_splits * p.num_kv_heads * (p.padded_head_dim / kCombineDims);
    *plan.header = header;
  }
}

int max_tiles(int num_tokens, int batch, int group_size, int num_ctas) {
  const int64_t rows = static_cast<int64_t>(num_tokens) * group_size;
  return static_cast<int>((rows + kPrefillRows - 1) / kPrefillRows) + batch + 2 * num_ctas;
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays the views out one behind the other; returns the end.
int64_t lay_out(PrefillPlan& plan, char* base, int num_tokens, int batch, int group_size, int padded_head_dim,
                int num_ctas) {
  plan.max_tiles = max_tiles(num_tokens, batch, group_size, num_ctas);
  plan.max_partials = 2 * num_ctas;
  int64_t offset = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + offset);
    offset = align(offset + count * static_cast<int64_t>(sizeof(*pointer)));
  };
  take(plan.header, 1);
  take(plan.splits, plan.max_partials);
  take(plan.arrived, plan.max_partials);
  take(plan.combined, plan.max_partials);
  take(plan.tiles, plan.max_tiles);
  take(plan.partial_rows, int64_t{plan.max_partials} * kPrefillRows);
  take(plan.partials, int64_t{plan.max_partials} * kPrefillRows * padded_head_dim);
  return offset;
}

}  // namespace

int64_t prefill_workspace_bytes(int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas) {
  PrefillPlan plan;
  return lay_out(plan, nullptr, num_tokens, batch, group_size, padded_head_dim, num_ctas);
}

PrefillPlan plan_view(void* workspace, int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas) {
  PrefillPlan plan;
  lay_out(plan, static_cast<char*>(workspace), num_tokens, batch, group_size, padded_head_dim, num_ctas);
  return plan;
}

void plan_prefill(const PrefillPlanParams& p, cudaStream_t stream) {
  const int bytes = shared_bytes(p.batch);
  BICL_CUDA_CHECK(cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(kThreads);
  config.shared_bytes = bytes;
  config.stream = stream;
  launch(plan_kernel, config, p);
}

}  // namespace bicl
