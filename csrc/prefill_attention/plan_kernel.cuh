// The tile list of one step, made by one CTA: longest tiles first, keys split where one tile would outlast its
// share of the work.
#pragma once

#include "plan_tail.cuh"

namespace bicl::prefill {

constexpr int kMinPieceBlocks = 2;
// Who ends a tile first is then first to draw, yet the next tile's Q comes in time. Pieces that fill the card once are
// short and wait for memory: what follows them is asked for at once.
constexpr int kDrawAhead = 6;
constexpr int64_t kSectionBytes = 24 << 20;  // K and V worked on at a time; L2 is 50 MB

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

  __device__ Cursor(const PrefillPlanParams& params, const PlanShared& s, int flat)
      : p(params), first_tile(s.first_tile), tile(), tile_in_sequence(0), num_tiles(0) {
    if (first_tile[p.batch] == 0) return;
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

__device__ int scan_tiles_of_sequences(const PrefillPlanParams& p, PlanShared& s) {
  int carry = 0;
  for (int base = 0; base < p.batch; base += kPlanThreads) {
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
  for (int i = threadIdx.x; i < p.batch; i += kPlanThreads) tokens += max(0, p.cache_seqlens[i]);
  return tokens;
}

// Blocks a piece may have; a tile costlier than this is split. kUnlimited: split nothing.
__device__ int piece_blocks(const PrefillPlanParams& p, PlanShared& s, int tiles, long long work, int max_cost) {
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
  for (int t = threadIdx.x / kCandidates; t < tiles; t += kPlanThreads / kCandidates) {
    const int piece = share + threadIdx.x % kCandidates * step;
    atomicAdd(&s.candidate_pieces[threadIdx.x % kCandidates], (Cursor(p, s, t).cost() + piece - 1) / piece);
  }
  __syncthreads();
  for (int i = 0; i < kCandidates; ++i)
    if (s.candidate_pieces[i] * heads <= p.num_ctas) return share + i * step;
  return kUnlimited;
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PrefillPlanParams p) {
  extern __shared__ __align__(16) char raw[];
  PlanShared& s = *reinterpret_cast<PlanShared*>(raw);
  const PrefillPlan& plan = p.plan;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // attention may set up its shared memory meanwhile; it waits for all of this
  long long work = 0, keys = sum_key_tokens(p);
  for (int i = thread; i < plan.max_partials; i += kPlanThreads) plan.arrived[i] = plan.combined[i] = 0;
  if (thread == 0) s.num_splits = s.num_partials = 0;
  const int tiles = scan_tiles_of_sequences(p, s);

  // Each thread owns a run of consecutive tiles.
  const int run = (tiles + kPlanThreads - 1) / kPlanThreads;
  const int first = min(thread * run, tiles), last = min(first + run, tiles);
  const Cursor start(p, s, min(first, max(tiles - 1, 0)));
  int max_cost = 1, min_cost = kUnlimited;
  if (first < last) {
    Cursor cursor = start;
    for (int t = first; t < last; ++t, cursor.next()) {
      work += cursor.cost();
      max_cost = max(max_cost, cursor.cost());
      min_cost = min(min_cost, cursor.cost());
    }
  }
  max_cost = __reduce_max_sync(~0u, max_cost);
  min_cost = __reduce_min_sync(~0u, min_cost);
#pragma unroll
  for (int d = 16; d; d /= 2) {
    work += __shfl_xor_sync(~0u, work, d);
    keys += __shfl_xor_sync(~0u, keys, d);
  }
  if (lane == 0) {
    s.warp_work[warp] = work, s.warp_keys[warp] = keys;
    s.warp_max[warp] = max_cost, s.warp_min[warp] = min_cost;
  }
  __syncthreads();
  work = keys = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    work += s.warp_work[w];
    keys += s.warp_keys[w];
    max_cost = max(max_cost, s.warp_max[w]);
    min_cost = min(min_cost, s.warp_min[w]);
  }
  int piece = piece_blocks(p, s, tiles, work, max_cost);

  // Partials needed; without room for them nothing is split.
  int partials = 0;
  if (piece < kUnlimited && first < last) {
    Cursor cursor = start;
    for (int t = first; t < last; ++t, cursor.next())
      if (cursor.cost() > piece) partials += (cursor.cost() + piece - 1) / piece;
  }
  int total;
  block_exclusive_sum(partials, s, total);
  if (static_cast<long long>(total) * p.num_kv_heads > plan.max_partials) piece = kUnlimited;

  // Stable counting sort by cost, costliest first. Pieces of a tile stay together.
  const int longest = min(max_cost, piece);
  for (int b = 0; b < kBuckets; ++b) count_at(s, b * kPlanThreads + thread) = 0;
  auto pieces_of = [&](int cost) { return cost > piece ? (cost + piece - 1) / piece : 1; };
  auto bucket_of = [&](int cost) {
    const int each = (cost + pieces_of(cost) - 1) / pieces_of(cost);
    return min(kBuckets - 1, max(0, longest - each) * kBuckets / longest);
  };
  if (first < last) {
    Cursor cursor = start;
    for (int t = first; t < last; ++t, cursor.next())
      count_at(s, bucket_of(cursor.cost()) * kPlanThreads + thread) += pieces_of(cursor.cost());
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
    Cursor cursor = start;
    for (int t = first; t < last; ++t, cursor.next()) {
      const int cost = cursor.cost(), pieces = pieces_of(cost);
      int& place = count_at(s, bucket_of(cost) * kPlanThreads + thread);
      PrefillTile tile = cursor.tile;
      tile.split = -1;
      if (pieces == 1) {
        plan.tiles[place++] = tile;
        continue;
      }
      const int index = atomicAdd(&s.num_splits, 1), slot = atomicAdd(&s.num_partials, pieces);
      plan.split_entries[index] = place;
      for (int i = 0; i < pieces; ++i) {
        PrefillTile part = tile;
        part.block_begin = tile.block_begin + cost * i / pieces;
        part.block_end = tile.block_begin + cost * (i + 1) / pieces;
        part.split = SplitPlace{slot + i, index, pieces}.pack();
        plan.tiles[place++] = part;
      }
    }
  }
  __syncthreads();
  int section = p.num_kv_heads;
  while (section > 1 && (p.num_kv_heads % section || keys * p.kv_bytes * section > kSectionBytes)) --section;
  Tail tail = {total, 0, 0};
  if (p.allow_split && s.num_splits == 0) tail = plan_tail(p, s, total, section, min_cost, max_cost);
  PrefillHeader header = {};
  header.num_tiles = total;
  header.heads_per_section = section;
  header.num_splits = s.num_splits + tail.splits;
  header.work_tickets = total * (p.num_kv_heads - section) + (tail.begin + tail.pieces) * section;
  header.tail_begin = tail.begin;
  header.split_heads = tail.splits > 0 ? section : p.num_kv_heads;
  header.head_partials = s.num_partials + tail.pieces;
  header.ahead = s.num_splits > 0 ? kUnlimited : kDrawAhead;
  header.total_tickets =
      header.work_tickets + header.num_splits * header.split_heads * (p.padded_head_dim / kCombineDims);
  if (thread == 0) *plan.header = header;
  __syncthreads();  // pieces are in the list
  for (int ticket = thread; ticket < p.num_ctas; ticket += kPlanThreads) {
    PrefillStart start = {};  // of a CTA without a ticket: read all the same
    if (ticket < header.work_tickets) {
      int entry;
      split_ticket(ticket, header, p.num_kv_heads, entry, start.head);
      start.tile = plan.tiles[entry];
    }
    plan.starts[ticket] = start;
  }
}

}  // namespace bicl::prefill
