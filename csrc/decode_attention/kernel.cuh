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
#include "merge.cuh"
#include "plan.cuh"
#include "sm80/loader.cuh"
#include "sm90/loader.cuh"

namespace bicl::decode {

template <typename T>
class DecodeCta : Merger<T> {
  using Base = Merger<T>;
  using Base::k_;
  using Base::lane_;
  using Base::p_;
  using Base::warp_;
  using Base::arrive;
  using Base::await_query;
  using Base::cluster_part;
  using Base::combine_cluster;
  using Base::combine_line;
  using Base::copy_next_query;
  using Base::copy_query;
  using Base::empty;
  using Base::entries;
  using Base::for_vectors;
  using Base::full;
  using Base::heads_of;
  using Base::merge;
  using Base::move_on;
  using Base::peers_done;
  using Base::push_nothing;
  using Base::query_slot;
  using Base::ring;
  using Base::start_cluster;
  using Base::wait_peers_started;
  using typename Base::Target;
  using typename Base::UpcomingQuery;

 public:
  __device__ explicit DecodeCta(const KernelParams& kp) : Base(kp) {}

  __device__ __forceinline__ void run() {
    if (p_.pdl && p_.late_lengths) ptx::grid_dependency_wait();
    const bool producer = warp_ == T::kConsumerWarps;
    const bool planned = k_.plan != nullptr;
    const Divider divider(k_);
    const Plan plan(k_);
    Share share;
    BlockSource block = {};
    int length = 0;
    if (planned) {
      share = read_vectors(plan.share());
      if (producer) block = read_vectors(plan.block_of_lane());
      else copy_entries(plan);
    } else {
      length = divider.lane_length();
    }
    // The query may be read at once, not only when the kernel ahead has ended. Else pages do not go first either: they
    // would hold up that kernel, and the query would wait behind all of them.
    const bool early = planned && (!p_.pdl || p_.late_lengths);
    int started = 0;  // blocks that are asked for
    if (!producer) init_barriers();  // it has more to do
    if (early && producer) {
      if constexpr (T::Loader::kLaneCopies) {
        ptx::named_barrier(kBarriersReady, T::kThreads);
        started = start_copies(block, share);
      }
    } else if (early) {
      if constexpr (T::Loader::kLaneCopies) ptx::named_barrier_arrive(kBarriersReady, T::kThreads);
      if (share.begin < share.end) copy_query(share.first.sequence, heads_of(share.first.head), 0);
      ptx::cp_async_commit();
    }
    if (!planned && T::Loader::kClusters) divider.cluster_share(share, length);
    const bool cluster = T::Loader::kClusters && share.cluster();
    if (cluster && share.first.sequence == Share::kNone) return;
    if (cluster) start_cluster();
    if (producer && !cluster && !planned) divider.build_entries(entries());
    if (!producer && planned) {  // the entries
      if (early) ptx::cp_async_wait<1>();
      else ptx::cp_async_wait<0>();
    }
    __syncwarp();
    ptx::named_barrier(kReady, T::kThreads);
    const Line line = divider.line(entries());
    if (!cluster && !planned) share = divider.line_share(line);
    if (producer) {
      int sequence = share.hint();
      if (p_.pdl && p_.late_table) ptx::grid_dependency_wait();
      if (!planned) block = divider.block_of_lane(line, share, share.begin, sequence);
      produce(divider, line, share, block, sequence, started);
      if (cluster) wait_peers_started();
    } else {
      if (cluster) wait_peers_started();
      if (p_.pdl) ptx::grid_dependency_wait();
      if (!cluster) clear_empty_sequences();
      if (cluster && share.begin == share.end) push_nothing(share.first);
      consume(line, share, cluster, early);
      if (cluster) combine_cluster(share.first);
    }
  }

 private:
  // --- start ----------------------------------------------------------------------------------------
  // The plan's entries, by the consumers; the buffers of both have room for whole 16 bytes.
  __device__ __forceinline__ void copy_entries(const Plan& plan) const {
    const int bytes = (p_.sequences.batch + 1) * static_cast<int>(sizeof(Entry));
    const char* source = reinterpret_cast<const char*>(plan.entries());
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < bytes; i += T::kConsumers * 16)
      ptx::cp_async_16(ptx::smem_address(entries()) + i, source + i);
    ptx::cp_async_commit();
  }

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

  // --- producer -------------------------------------------------------------------------------------
  // Asks for the first blocks, a lane each, as far as the ring holds them and they are whole pages: few instructions,
  // since code that runs once comes from far away. Returns how many.
  __device__ __forceinline__ int start_copies(const BlockSource& block, const Share& share) const {
    const bool whole = block.rows == kBlockKeys && p_.pages.page_size == kBlockKeys;
    const uint32_t others = ~__ballot_sync(~0u, whole);
    const int count = min(others ? __ffs(others) - 1 : 32, min(k_.stages, share.end - share.begin));
    const typename T::Loader loader;
    if (lane_ < count) loader.template copy_whole<T>(block, p_.pages, ring(lane_), full(lane_));
    __syncwarp();
    return count;
  }

  // `next`: the lane's block of the first 32, of `sequence` or an earlier one; `started` of them have been asked for.
  __device__ __forceinline__ void produce(const Divider& divider, const Line& line, const Share& share,
                                          BlockSource next, int sequence, int started) {
    typename T::Loader loader;
    bool waited = !p_.pdl;
    int stage = started;
    uint32_t parity = 1;  // the first round finds its stages empty
    if (stage == k_.stages) stage = 0, parity = 0;
    // The next kernel is let in at once where it finds no room before CTAs end, else when the rest fits the ring:
    // clusters placed beside running ones slow both down.
    const int release = 2 * static_cast<int>(gridDim.x) > p_.num_sms ? 0 : share.end - share.begin - k_.stages;
    if (p_.pdl && max(release, 0) < started) ptx::grid_launch_dependents();
    int turn = started;
#pragma unroll 1
    for (int x = share.begin; x < share.end; x += 32, turn = 0) {
      const BlockSource block = next;
      const uint32_t newest = __ballot_sync(~0u, block.newest);
      const int count = min(32, share.end - x);
#pragma unroll 1
      for (; turn < count; ++turn) {
        // Old pages stream while the kernel before this one still writes the newest token.
        if (!waited && (newest >> turn & 1)) {
          ptx::grid_dependency_wait();
          waited = true;
        }
        loader.template load<T>(block, turn, lane_, p_.pages, ring(stage), full(stage), empty(stage), parity);
        if (++stage == k_.stages) stage = 0, parity ^= 1;
        if (p_.pdl && x - share.begin + turn == max(release, 0)) ptx::grid_launch_dependents();
        // The next 32, once the ring has enough to do.
        if (turn == min(k_.stages, count - 1)) next = divider.block_of_lane(line, share, x + 32, sequence);
      }
    }
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

  __device__ __forceinline__ void consume(const Line& line, const Share& share, bool cluster, bool early) {
    const int slots = p_.deterministic ? kMaxUnits + 1 : 2;
    if (share.begin == share.end) return;
    Cursor cursor(share.begin, warp_ / 2);
    WarpState<T> state;
    Query<T> query;
    Place place = share.first;
    int split = max(share.split, 0);  // blocks of a head that goes first
    UpcomingQuery upcoming{place.sequence * static_cast<int>(k_.heads.divisor) + place.head,
                           split > 0 ? UpcomingQuery::kSplit : share.begin - place.block};
    if (early) move_on(upcoming, line, share);  // the first is on its way
#pragma unroll 1
    for (int i = early; i < T::kQuerySlots; ++i) copy_next_query(upcoming, line, share, i);
    int slot = 0;
    await_query(slot);
    ptx::named_barrier(kConsumersOnly, T::kConsumers);
#pragma unroll 1
    for (int x = share.begin; x < share.end;) {
      // A segment: consecutive blocks of one (sequence, head).
      const int count = min(place.num_blocks - place.block, split > 0 ? split : share.end - x);
      const int step = p_.deterministic ? unit_blocks(place.num_blocks, T::kGroups) : count;
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
          copy_next_query(upcoming, line, share, slot);
          slot = slot + 1 < T::kQuerySlots ? slot + 1 : 0;
          await_query(slot);
        }
        merge(state, place.sequence, heads_of(place.head), target);
      }
      if (!cluster && count < place.num_blocks) {
        if (const int parts = arrive(line, place, count, slots)) combine_line(place, heads_of(place.head), parts);
      }
      x += count;
      if (x < share.end) place = split > 0 ? line.place(share.begin, 0) : line.after(place);
      split = 0;
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
