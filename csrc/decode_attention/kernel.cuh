// Decode attention: one query token a sequence, keys and values read once from BICL pages.
//
//   producer warp   resolves blocks of 64 keys, 32 at a time, and copies them into a ring of stages
//   consumer warps  two a block, 32 keys each, every warp with its own running maximum; results are merged
//                   in shared memory when a unit of work ends
//   combine         whole (sequence, head) pairs are written at once; split ones through the workspace, by the
//                   CTA that comes last (stream-K), or through distributed shared memory (cluster)
//
// Everything is read from device memory: a captured launch is right for any lengths.
#pragma once

#include "block.cuh"
#include "combine.cuh"
#include "sm80/loader.cuh"
#include "sm90/loader.cuh"

namespace bicl::decode {

template <typename T>
class DecodeCta : Combiner<T> {
  using Base = Combiner<T>;
  using Base::k_;
  using Base::lane_;
  using Base::p_;
  using Base::warp_;
  using Base::arrive;
  using Base::cluster_part;
  using Base::combine_cluster;
  using Base::combine_line;
  using Base::empty;
  using Base::entries;
  using Base::get_kept;
  using Base::for_vectors;
  using Base::full;
  using Base::heads_of;
  using Base::keep;
  using Base::merge_rows;
  using Base::multiple;
  using Base::peers_done;
  using Base::push;
  using Base::push_nothing;
  using Base::query_slot;
  using Base::put_partial;
  using Base::ring;
  using Base::shared;
  using Base::start_cluster;
  using Base::stats;
  using Base::vector_share;
  using Base::wait_peers_started;
  using typename Base::Plan;

 public:
  __device__ explicit DecodeCta(const KernelParams& kp) : Base(kp) {}

  __device__ __forceinline__ void run() {
    if (p_.pdl) ptx::grid_launch_dependents();
    if (p_.pdl && p_.late_table) ptx::grid_dependency_wait();
    int length = 0;  // of the lane's sequence, where clusters may work
    if (k_.cluster_log2 > 0 && lane_ < p_.sequences.batch) length = p_.sequences.cache_seqlens[lane_];
    const bool producer = warp_ == T::kConsumerWarps;
    if (!producer) init_barriers();  // it has more to do
    Share share;
    const bool cluster = cluster_share(share, length);
    if (cluster && share.head.sequence == kNone) return;
    if (cluster) start_cluster();
    if (producer && !cluster)
      build_entries(entries(), p_.sequences, p_.window_left, multiple(), T::kLeastCharge);
    __syncwarp();
    ptx::named_barrier(kReady, T::kThreads);
    const Line line(entries(), p_.sequences.batch, k_.heads.divisor, k_.grid, p_.deterministic,
                    T::kLeastCharge);
    if (!cluster) {
      const Bounds bounds = line.share_of(blockIdx.x);
      share.begin = bounds.begin;
      share.end = bounds.end;
      share.head.sequence = bounds.sequence;
    }
    if (producer) {
      produce(line, share, cluster);
      if (cluster) wait_peers_started();
    } else {
      if (cluster) wait_peers_started();
      if (p_.pdl) ptx::grid_dependency_wait();
      if (!cluster) clear_empty_sequences();
      if (cluster && share.begin == share.end) push_nothing(share.head);
      consume(line, share, cluster);
      if (cluster) combine_cluster(share.head);
    }
  }

 private:
  // --- scheduling -----------------------------------------------------------------------------------
  static constexpr int kNone = -1;

  // A CTA's blocks [begin, end): blocks of `head` in a cluster, else positions in the line from head.sequence on.
  struct Share {
    int begin, end;
    Place head;
  };

  // Whether clusters work on a (sequence, head) each, in equal shares. There is no balancing: lengths must be even.
  // From registers alone (a batch of at most 32; `length` is this lane's), for a quick start.
  __device__ __forceinline__ bool cluster_share(Share& share, int length) const {
    if (!T::Loader::kClusters || k_.cluster_log2 == 0) return false;
    const int blocks = visible_span(length, p_.window_left, multiple()).num_blocks;
    const int longest = __reduce_max_sync(~0u, blocks);
    const int batch = p_.sequences.batch;
    if (batch > 1 && 4 * longest * batch > 5 * __reduce_add_sync(~0u, blocks)) return false;
    if (p_.deterministic && num_units(longest) * vector_share() > T::kResults) return false;  // parts need room
    uint32_t head;
    const int sequence = k_.heads.divide(blockIdx.x >> k_.cluster_log2, head);
    if (sequence >= batch) {  // there are enough clusters for stream-K, which some lengths need
      share.head.sequence = kNone;
      return true;
    }
    const int count = __shfl_sync(~0u, blocks, sequence);
    share.head = {sequence, static_cast<int>(head), 0, count, __shfl_sync(~0u, length, sequence)};
    // Shares are whole units in deterministic mode, blocks else.
    const int step = p_.deterministic ? unit_blocks(count) : 1;
    const int steps = p_.deterministic ? num_units(count) : count;
    const int rank = ptx::cluster_rank();
    share.begin = min((rank * steps >> k_.cluster_log2) * step, count);
    share.end = min(((rank + 1) * steps >> k_.cluster_log2) * step, count);
    return true;
  }

  __device__ __forceinline__ Place place_of(const Line& line, const Share& share, bool cluster, int x, int hint) const {
    if (!cluster) return line.place(x, hint);
    Place place = share.head;
    place.block = x;
    return place;
  }

  // --- producer -------------------------------------------------------------------------------------
  __device__ __forceinline__ void init_barriers() const {
    // One at a time within a warp, so the warps share them.
    const int stage = warp_ + lane_ * T::kConsumerWarps;
    if (stage < k_.stages) {
      ptx::mbarrier_init(full(stage), T::Loader::kFullArrivals);
      ptx::mbarrier_init(empty(stage), 2 * ptx::kWarpArrivals);  // the two warps of the stage's group
    }
    if (threadIdx.x == T::kConsumers - 1) ptx::mbarrier_init(peers_done(), 1);
    if constexpr (T::Loader::kClusters) ptx::fence_barrier_init();
    __syncwarp();
  }

  __device__ __forceinline__ BlockSource resolve(const Place& place) const {
    const Span span = visible_span(place.length, p_.window_left, 1);
    const int key = (span.first_block + place.block) * kBlockKeys;
    const int left = place.length - key;
    BlockSource block;
    block.head = k_.head_blocks.divide(place.head);
    block.rows = max(0, min(left, kBlockKeys));
    block.newest = left > 0 && left <= kBlockKeys;
    const int32_t* table = p_.sequences.page_table + place.sequence * p_.sequences.page_table_stride +
                           block.head * p_.sequences.page_table_head_stride;
    if (p_.pages.page_size == kBlockKeys) {
      block.page[0] = left > 0 ? table[key / kBlockKeys] : 0;
    } else {
      block.page[0] = left > 0 ? table[key / 32] : 0;
      block.page[1] = left > 32 ? table[key / 32 + 1] : 0;
    }
    return block;
  }

  __device__ __forceinline__ void produce(const Line& line, const Share& share, bool cluster) {
    typename T::Loader loader;
    bool waited = !p_.pdl;
    int stage = 0;
    uint32_t parity = 1;  // the first round finds its stages empty
    int sequence = share.head.sequence;  // of this lane's last block
    BlockSource next = resolve_lane(line, share, cluster, share.begin, sequence);
#pragma unroll 1
    for (int x = share.begin; x < share.end; x += 32) {
      const BlockSource block = next;
      const uint32_t newest = __ballot_sync(~0u, block.newest);
      const int count = min(32, share.end - x);
#pragma unroll 1
      for (int turn = 0; turn < count; ++turn) {
        // Old pages stream while the kernel before this one still writes the newest token.
        if (!waited && (newest >> turn & 1)) {
          ptx::grid_dependency_wait();
          waited = true;
        }
        loader.template load<T>(block, turn, lane_, p_.pages, ring(stage), full(stage), empty(stage), parity);
        if (++stage == k_.stages) stage = 0, parity ^= 1;
        // The next 32, once the ring has enough to do.
        if (turn == min(k_.stages, count) - 1) next = resolve_lane(line, share, cluster, x + 32, sequence);
      }
    }
  }

  // This lane's block of the 32 from x on.
  __device__ __forceinline__ BlockSource resolve_lane(const Line& line, const Share& share, bool cluster, int x,
                                                     int& sequence) const {
    if (x + lane_ >= share.end) return {};
    const Place place = place_of(line, share, cluster, x + lane_, sequence);
    sequence = place.sequence;
    return resolve(place);
  }

  // --- consumers ------------------------------------------------------------------------------------
  // This warp's position in the ring: it visits every kGroups-th block of the CTA's share.
  struct Cursor {
    int x;  // next block of this warp's group
    int stage;
    uint32_t parity = 0;

    __device__ Cursor(int begin, int group) : x(begin + group), stage(group) {}

    __device__ __forceinline__ void advance(int stages) {
      x += T::kGroups;
      stage += T::kGroups;
      if (stage >= stages) stage -= stages, parity ^= 1;
    }
  };

  // Where a unit's result goes.
  struct Target {
    enum Kind { kFinal, kWorkspace, kCluster, kKeep } kind;
    bool fold;  // onto what was kept
    int slot;   // of the workspace, or the part of the cluster's result
  };

  __device__ __forceinline__ void consume(const Line& line, const Share& share, bool cluster) {
    const int slots = p_.deterministic ? kMaxUnits + 1 : 2;
    if (share.begin == share.end) return;
    Cursor cursor(share.begin, warp_ / 2);
    WarpState<T> state;
    Query<T> query;
    Place place = place_of(line, share, cluster, share.begin, share.head.sequence);
    UpcomingQuery upcoming{place.sequence * static_cast<int>(k_.heads.divisor) + place.head, share.begin - place.block};
#pragma unroll 1
    for (int i = 0; i < T::kQuerySlots; ++i) copy_next_query(upcoming, line, share, cluster, i);
    int slot = 0;
    await_query(slot);
    ptx::named_barrier(kConsumersOnly, T::kConsumers);
#pragma unroll 1
    for (int x = share.begin; x < share.end;) {
      // A segment: consecutive blocks of one (sequence, head).
      const int count = min(place.num_blocks - place.block, share.end - x);
      const int step = p_.deterministic ? unit_blocks(place.num_blocks) : count;
      query.set(query_slot(slot), lane_);
#pragma unroll 1
      for (int done = 0, index = 0; done < count; done += step, ++index) {
        const int unit_end = x + min(done + step, count);
        unit(cursor, place, x - place.block, unit_end, query, state);
        const bool last = unit_end == x + count;
        const bool from_start = place.block == 0, whole = count == place.num_blocks;
        // Deterministic units are folded in order; where an earlier CTA began the head, they stay apart.
        Target target{Target::kFinal, from_start && done > 0, static_cast<int>(blockIdx.x) * slots};
        if (cluster) target = {Target::kCluster, false, cluster_part(place.block + done, step)};
        else if (from_start && !last) target.kind = Target::kKeep;
        else if (!whole) target.kind = Target::kWorkspace, target.slot += from_start ? slots - 1 : index;
        ptx::named_barrier(kConsumersOnly, T::kConsumers);  // merge buffer and query have been read
        if (last && unit_end < share.end) {  // in a cluster there is no next: the other slots hold results there
          copy_next_query(upcoming, line, share, cluster, slot);
          slot = slot + 1 < T::kQuerySlots ? slot + 1 : 0;
          await_query(slot);
        }
        merge(state, place.sequence, heads_of(place.head), target);
      }
      if (!cluster && count < place.num_blocks) {
        if (const int parts = arrive(line, place, count, slots)) combine_line(place, heads_of(place.head), parts);
      }
      x += count;
      if (x < share.end) place = line.after(place);
    }
  }

  // Blocks up to unit_end of one (sequence, head); `start` is the head's first position in the line.
  __device__ __forceinline__ void unit(Cursor& cursor, const Place& place, int start, int unit_end,
                                       const Query<T>& query, WarpState<T>& state) const {
    const Span span = visible_span(place.length, p_.window_left, 1);
    const int half = warp_ % 2;
    const StageView<T> view(half, lane_, p_.pages.page_size);
    const float scale = p_.scale * p_.pages.k_scale;
    state.reset();
#pragma unroll 1
    for (; cursor.x < unit_end; cursor.advance(k_.stages)) {
      const int key = (span.first_block + cursor.x - start) * kBlockKeys + half * kWarpKeys;
      // Visible keys, counted from the warp's first.
      const int low = span.first_key - key, high = place.length - key;
      ptx::mbarrier_wait(full(cursor.stage), cursor.parity);
      if (high > 0 && low < kWarpKeys) {
        const bool masked = low > 0 || high < kWarpKeys;
        const uint32_t stage = ring(cursor.stage);
        float score[2][T::kHeadBlocks][4];
        scores<T>(score, query, view, stage + view.keys);
        scale_scores<T>(score, scale, p_.softcap);
        if (masked) {
          mask_scores<T>(score, low, high, lane_);
          clear_values<T>(view, stage + view.values, low, high, lane_);
        }
        softmax_step<T>(score, state);
        accumulate<T>(score, state, view, stage + view.values);
        if constexpr (T::Loader::kClusters)
          if (masked) ptx::fence_proxy_async();
      }
      __syncwarp();
      ptx::mbarrier_arrive_warp(empty(cursor.stage), lane_);
    }
  }

  // --- queries ----------------------------------------------------------------------------------------
  // The next head whose query is to be copied.
  struct UpcomingQuery {
    int pair;  // sequence * heads + head: one register
    int x;     // its first position
  };

  // Calls f(row, dim, address) for the 16-byte chunks of a slot that are this thread's.
  template <typename F>
  __device__ __forceinline__ void for_query_chunks(int slot, F&& f) const {
    constexpr int kRowChunks = T::kHeadDim / 8, kChunks = T::kHeads * kRowChunks;
#pragma unroll
    for (int i = 0; i < (kChunks + T::kConsumers - 1) / T::kConsumers; ++i) {
      const int chunk = threadIdx.x + i * T::kConsumers;
      if (kChunks % T::kConsumers != 0 && chunk >= kChunks) break;
      const int row = chunk / kRowChunks, dim = chunk % kRowChunks * 8;
      f(row, dim, query_slot(slot) + (row * T::kQueryStride + dim) * 2);
    }
  }

  // Always commits, so that a fixed count of younger copies may be on their way while one is awaited. Rows and dims
  // that do not exist become zeros.
  __device__ __forceinline__ void copy_next_query(UpcomingQuery& next, const Line& line, const Share& share, bool cluster,
                                                  int slot) const {
    if (next.x < share.end) {
      uint32_t pair_head;
      int sequence = k_.heads.divide(next.pair, pair_head), head = pair_head;
      const Heads heads = heads_of(head);
      const auto* rows = static_cast<const uint16_t*>(p_.query) + sequence * p_.query_token_stride +
                         heads.first_query * p_.query_head_stride;
      for_query_chunks(slot, [&](int row, int dim, char* target) {
        const bool exists = row < heads.active && dim < p_.head_dim;
        ptx::cp_async_16(ptx::smem_address(target), exists ? rows + row * p_.query_head_stride + dim : rows, exists);
      });
      next.x = cluster ? share.end : next.x + line.blocks(sequence);
      if (next.x < share.end) {
        line.advance(sequence, head);
        next.pair = sequence * k_.heads.divisor + head;
      }
    }
    ptx::cp_async_commit();
  }

  // A barrier must follow. fp8 pages are multiplied as fp16: each thread converts what it copied.
  __device__ __forceinline__ void await_query(int slot) const {
    ptx::cp_async_wait<T::kQuerySlots - 1>();
    if (!T::kFp8 || p_.query_dtype == DType::kFloat16) return;
    const auto convert = [](uint32_t bits) {
      const auto clamp = [](uint32_t b) { return fminf(fmaxf(__uint_as_float(b), -65504.f), 65504.f); };
      return ptx::pack(clamp(bits << 16), clamp(bits & 0xffff0000u), __half{});
    };
    for_query_chunks(slot, [&](int, int, char* at) {
      auto* chunk = reinterpret_cast<uint4*>(at);
      const uint4 v = *chunk;
      *chunk = make_uint4(convert(v.x), convert(v.y), convert(v.z), convert(v.w));
    });
  }

  // --- results ----------------------------------------------------------------------------------------
  // The warps' states to one piece a thread, and on to its target. The merge buffer must be free.
  __device__ __forceinline__ void merge(WarpState<T>& state, int sequence, const Heads& heads, const Target& target) {
    put_state(state, heads.active);
    ptx::named_barrier(kConsumersOnly, T::kConsumers);
    for_vectors(heads, [&](int v, int row, int dim) {
      Piece piece = merged(row, dim);
      if (target.fold) {
        Piece kept = get_kept(v);
        fold(kept, piece.maximum, piece.sum, piece.out);
        piece = kept;
      }
      switch (target.kind) {
        case Target::kFinal:
          write_final<T>(p_, sequence, heads.first_query + row, dim, piece);
          break;
        case Target::kWorkspace: put_partial(target.slot, row, dim, piece); break;
        case Target::kCluster: push(target.slot, v, piece); break;
        case Target::kKeep: keep(v, piece); break;
      }
    });
  }

  __device__ __forceinline__ void put_state(WarpState<T>& state, int active) const {
    const int g = lane_ / 4, t = lane_ % 4;
    float* rows = merge_rows() + (warp_ * T::kHeads + 2 * t) * T::kMergeStride;
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum = state.sum[n][j];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (g == 0) stats()[warp_ * T::kHeads + 8 * n + 2 * t + j] = make_float2(state.maximum[n][j], sum);
        if (8 * n >= active) continue;
        float* row = rows + (8 * n + j) * T::kMergeStride + (T::kFp8 ? 2 * g : g);
#pragma unroll
        for (int d = 0; d < WarpState<T>::kSteps; ++d)
          if constexpr (T::kFp8) {
            *reinterpret_cast<float2*>(row + 16 * d) = make_float2(state.out[d][n][j], state.out[d][n][j + 2]);
          } else {
            row[16 * d] = state.out[d][n][j];
            row[16 * d + 8] = state.out[d][n][j + 2];
          }
      }
  }

  __device__ __forceinline__ Piece merged(int row, int dim) const {
    Piece all;
#pragma unroll
    for (int w = 0; w < T::kConsumerWarps; ++w)
      all.maximum = fmaxf(all.maximum, stats()[w * T::kHeads + row].x);
#pragma unroll
    for (int w = 0; w < T::kConsumerWarps; ++w) {
      const float2 stat = stats()[w * T::kHeads + row];
      const float weight = ptx::exp2_approx(stat.x - all.maximum);
      const float4 out =
          *reinterpret_cast<const float4*>(merge_rows() + (w * T::kHeads + row) * T::kMergeStride + dim);
      all.sum = __fmaf_rn(stat.y, weight, all.sum);
      all.out.x = __fmaf_rn(out.x, weight, all.out.x);
      all.out.y = __fmaf_rn(out.y, weight, all.out.y);
      all.out.z = __fmaf_rn(out.z, weight, all.out.z);
      all.out.w = __fmaf_rn(out.w, weight, all.out.w);
    }
    return all;
  }

  // Sequences without keys get no work: zeros, and -inf for their LSE.
  __device__ __forceinline__ void clear_empty_sequences() const {
#pragma unroll 1
    for (int b = blockIdx.x; b < p_.sequences.batch; b += gridDim.x) {
      if (entries()[b].length > 0) continue;
#pragma unroll 1
      for (int head = 0; head < static_cast<int>(k_.heads.divisor); ++head) {
        const Heads heads = heads_of(head);
        for_vectors(heads, [&](int, int row, int dim) {
          write_final<T>(p_, b, heads.first_query + row, dim, Piece{});
        });
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) decode_kernel(const __grid_constant__ KernelParams params) {
#ifndef BICL_NO_DEVICE_CODE  // a card outside the build; NVRTC makes it there
  DecodeCta<T>(params).run();
#endif
}

}  // namespace bicl::decode
