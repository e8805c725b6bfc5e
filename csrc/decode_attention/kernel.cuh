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
#include "result.cuh"
#include "schedule.cuh"
#include "sm80/loader.cuh"
#include "sm90/loader.cuh"

namespace bicl::decode {

struct KernelParams {
  DecodeParams p;
  int heads;        // (KV head, block of query heads) pairs of one sequence
  int head_blocks;  // blocks of query heads of one KV head
  int group;        // query heads of one KV head
  int stages;
  int cluster;      // CTAs a cluster; 1: stream-K only
  bool query_pairs; // query elements may be read in aligned pairs
  bool out_vectors; // outputs may be written four at a time
};

constexpr int kConsumerBarrier = 1;

template <typename T>
class DecodeCta {
 public:
  __device__ DecodeCta(const KernelParams& kp, char* shared)
      : k_(kp), p_(kp.p), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int s = 0; s < k_.stages; ++s) {
        ptx::mbarrier_init(full(s), T::Loader::kFullArrivals);
        ptx::mbarrier_init(empty(s), 2);  // the two warps of the stage's group
      }
      if constexpr (T::Loader::kClusters) ptx::fence_barrier_init();
    }
    if (p_.pdl) ptx::grid_launch_dependents();
    build_prefix(prefix(), &longest(), p_.sequences.cache_seqlens, p_.sequences.batch, p_.window_left, multiple());
    const Line line(prefix(), p_.sequences.batch, k_.heads, gridDim.x, p_.deterministic);
    const bool cluster = use_cluster(line);
    int begin, end;
    if (cluster) {
      cluster_share(begin, end);
    } else {
      begin = line.begin(blockIdx.x);
      end = line.begin(blockIdx.x + 1);
    }
    if (warp_ == T::kConsumerWarps) produce(line, begin, end);
    else consume(line, begin, end, cluster);
    if (cluster) combine_cluster();
  }

 private:
  // --- scheduling -----------------------------------------------------------------------------------
  __device__ __forceinline__ int multiple() const { return p_.deterministic ? T::kGroups : 1; }

  // A cluster a (sequence, head) has no balancing: lengths must be even.
  __device__ __forceinline__ bool use_cluster(const Line& line) const {
    if (!T::Loader::kClusters || k_.cluster == 1 || line.total() == 0) return false;
    const int batch = p_.sequences.batch;
    return batch == 1 || 4ll * longest() * batch <= 5ll * prefix()[batch];
  }

  // One cluster a (sequence, head), equal shares of its blocks.
  __device__ __forceinline__ void cluster_share(int& begin, int& end) const {
    const int pair = blockIdx.x / k_.cluster, rank = blockIdx.x % k_.cluster;
    const int sequence = pair / k_.heads, head = pair % k_.heads;
    const int blocks = prefix()[sequence + 1] - prefix()[sequence];
    const int start = prefix()[sequence] * k_.heads + head * blocks;
    begin = start + rank * blocks / k_.cluster;
    end = start + (rank + 1) * blocks / k_.cluster;
  }

  // --- producer -------------------------------------------------------------------------------------
  __device__ __forceinline__ BlockSource resolve(const Line& line, int x, bool& newest) const {
    const Place place = line.place(x);
    const int length = p_.sequences.cache_seqlens[place.sequence];
    const Span span = visible_span(length, p_.window_left, multiple());
    const int key = (span.first_block + place.block) * kBlockKeys;
    const int head = place.head / k_.head_blocks;
    BlockSource block;
    block.rows = max(0, min(length - key, kBlockKeys));
    newest = block.rows > 0 && key + kBlockKeys >= length;
    const int32_t* table = p_.sequences.page_table + place.sequence * p_.sequences.page_table_stride;
    const auto page_at = [&](int token) {
      const int64_t page = table[token / p_.pages.page_size];
      return static_cast<const char*>(p_.pages.data) + head_page_offset(p_.pages, page, head);
    };
    block.page[0] = block.rows > 0 ? page_at(key) : nullptr;
    block.page[1] = block.rows > p_.pages.page_size ? page_at(key + p_.pages.page_size) : nullptr;
    return block;
  }

  __device__ void produce(const Line& line, int begin, int end) {
    typename T::Loader loader;
    bool waited = !p_.pdl;
    int stage = 0;
    uint32_t parity = 1;  // the first round finds its stages empty
    BlockSource next{};
    bool next_newest = false;
    if (begin + lane_ < end) next = resolve(line, begin + lane_, next_newest);
    for (int x = begin; x < end; x += 32) {
      const BlockSource block = next;
      const uint32_t newest = __ballot_sync(~0u, next_newest && x + lane_ < end);
      if (x + 32 + lane_ < end) next = resolve(line, x + 32 + lane_, next_newest);
      const int count = min(32, end - x);
      for (int turn = 0; turn < count; ++turn) {
        // Old pages stream while the kernel before this one still writes the newest token.
        if (!waited && (newest >> turn & 1)) {
          ptx::grid_dependency_wait();
          waited = true;
        }
        loader.template load<T>(block, turn, lane_, p_.pages, ring(stage), full(stage),
                                empty(stage), parity);
        if (++stage == k_.stages) stage = 0, parity ^= 1;
      }
    }
  }

  // --- consumers ------------------------------------------------------------------------------------
  // This warp's position in the ring: it visits every kGroups-th block of the CTA's share.
  struct Cursor {
    int x;      // next block of this warp's group
    int stage;
    uint32_t parity = 0;

    __device__ Cursor(const DecodeCta& cta, int begin) : x(begin + cta.warp_ / 2), stage(cta.warp_ / 2) {}

    __device__ __forceinline__ void advance(int stages) {
      x += T::kGroups;
      stage += T::kGroups;
      if (stage >= stages) stage -= stages, parity ^= 1;
    }
  };

  __device__ void consume(const Line& line, int begin, int end, bool cluster) {
    if (p_.pdl) ptx::grid_dependency_wait();
    if (!cluster) clear_empty_sequences();
    const int slots = p_.deterministic ? kMaxUnits + 1 : 2;
    Cursor cursor(*this, begin);
    Piece pieces[T::kOwned];
    for (int x = begin; x < end;) {
      // A segment: consecutive blocks of one (sequence, head).
      const Place place = line.place(x);
      const int count = min(place.num_blocks - place.block, end - x);
      const bool from_start = place.block == 0;
      const int step = p_.deterministic ? unit_blocks(place.num_blocks) : count;
      Query<T> query;
      load_query(query, place.sequence, place.head);
      reset(pieces);
      for (int done = 0, index = 0; done < count; done += step, ++index) {
        Place part = place;
        part.block += done;
        unit(cursor, part, x + done, min(step, count - done), query, pieces);
        if (!from_start && !cluster) {  // an earlier CTA began this head: units stay apart, to be folded in order
          put_partial(partial(blockIdx.x * slots + index), place.head, pieces);
          reset(pieces);
        }
      }
      if (!cluster) finish_segment(line, place, x, count, slots, pieces);
      x += count;
    }
    if (cluster) {
      ptx::named_barrier(kConsumerBarrier, T::kConsumers);  // the ring is empty
      put_partial(exchange(), cluster_head(), pieces);
    }
  }

  __device__ __forceinline__ void finish_segment(const Line& line, const Place& place, int x, int count, int slots,
                                                 const Piece (&pieces)[T::kOwned]) {
    if (count == place.num_blocks) {
      write_pieces(place.sequence, place.head, pieces);
      return;
    }
    if (place.block == 0) put_partial(partial(blockIdx.x * slots + slots - 1), place.head, pieces);
    if (arrive_last(place, count)) combine_line(line, place, x - place.block, slots);
  }

  // Blocks [place.block, + count) of one (sequence, head), at `first` in the line, merged over the warps and folded into `pieces`.
  __device__ __forceinline__ void unit(Cursor& cursor, const Place& place, int first, int count,
                                       const Query<T>& query, Piece (&pieces)[T::kOwned]) {
    const int length = p_.sequences.cache_seqlens[place.sequence];
    const Span span = visible_span(length, p_.window_left, 1);
    const int half = warp_ % 2;
    const StageView<T> view(half, lane_, p_.pages.page_size);
    const float scale = p_.scale * p_.pages.k_scale;
    WarpState<T> state;
    state.reset();
    for (; cursor.x < first + count; cursor.advance(k_.stages)) {
      const int key = (span.first_block + place.block + cursor.x - first) * kBlockKeys + half * kWarpKeys;
      const int low = span.first_key - key, high = length - key;  // visible keys, from the warp's first
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
      if (lane_ == 0) ptx::mbarrier_arrive(empty(cursor.stage));
    }
    merge(state, place.head, pieces);
  }

  // Zero for rows and dims that do not exist; fp8: as fp16.
  __device__ __forceinline__ void load_query(Query<T>& query, int sequence, int head) const {
    if (k_.query_pairs) {
      load_query_with(query, sequence, head, [](const uint16_t* source, int) {
        return *reinterpret_cast<const uint32_t*>(source);
      });
    } else {
      load_query_with(query, sequence, head, [](const uint16_t* source, int left) {
        return source[0] | (left > 1 ? static_cast<uint32_t>(source[1]) << 16 : 0u);
      });
    }
  }

  template <typename Load>
  __device__ __forceinline__ void load_query_with(Query<T>& query, int sequence, int head, Load load) const {
    const int t = lane_ % 4;
    const int active = active_heads(head);
    const auto pair = [&](int n, int dim) {
      const int row = 8 * n + lane_ / 4;
      if (row >= active || dim >= p_.head_dim) return 0u;
      const uint32_t bits = load(static_cast<const uint16_t*>(p_.query) + sequence * p_.query_token_stride +
                                     (first_query_head(head) + row) * p_.query_head_stride + dim,
                                 p_.head_dim - dim);
      if (!T::kFp8 || p_.query_dtype == DType::kFloat16) return bits;
      const auto clamp = [](uint32_t b) { return fminf(fmaxf(__uint_as_float(b), -65504.f), 65504.f); };
      return ptx::pack(clamp(bits << 16), clamp(bits & 0xffff0000u), __half{});
    };
    const auto first = [&](int n, int k) { return pair(n, 16 * k + (T::kFp8 ? 4 : 2) * t); };
    const auto second = [&](int n, int k) { return pair(n, 16 * k + (T::kFp8 ? 4 * t + 2 : 2 * t + 8)); };
    if constexpr (T::kQueryShared) {
      auto* shared = reinterpret_cast<uint2*>(shared_ + Plan::kQuery) + lane_;
      ptx::named_barrier(kConsumerBarrier, T::kConsumers);  // the last query has been used
#pragma unroll 2
      for (int i = warp_; i < T::kHeadBlocks * Query<T>::kSteps; i += T::kConsumerWarps)
        shared[i * 32] = make_uint2(first(i / Query<T>::kSteps, i % Query<T>::kSteps),
                                    second(i / Query<T>::kSteps, i % Query<T>::kSteps));
      ptx::named_barrier(kConsumerBarrier, T::kConsumers);
      query.shared = shared;
    } else {
#pragma unroll
      for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
        for (int k = 0; k < Query<T>::kSteps; ++k) {
          query.fragments[n][k][0] = first(n, k);
          query.fragments[n][k][1] = second(n, k);
        }
    }
  }

  // --- results ----------------------------------------------------------------------------------------
  __device__ __forceinline__ int first_query_head(int head) const {
    return head / k_.head_blocks * k_.group + head % k_.head_blocks * T::kHeads;
  }
  __device__ __forceinline__ int active_heads(int head) const {
    return min(T::kHeads, k_.group - head % k_.head_blocks * T::kHeads);
  }

  __device__ __forceinline__ static void reset(Piece (&pieces)[T::kOwned]) {
#pragma unroll
    for (int i = 0; i < T::kOwned; ++i) pieces[i] = Piece{};
  }

  // Calls f(i, row, dim) for each float4 this thread owns: its index, query row of the CTA, first dim.
  template <typename F>
  __device__ __forceinline__ void for_owned(int head, F&& f) const {
    const int active = active_heads(head) * (T::kHeadDim / 4);
#pragma unroll
    for (int i = 0; i < T::kOwned; ++i) {
      const int vector = threadIdx.x + i * T::kConsumers;
      if (vector < active) f(i, vector / (T::kHeadDim / 4), vector % (T::kHeadDim / 4) * 4);
    }
  }

  // The warps' states to one piece a thread.
  __device__ __forceinline__ void merge(WarpState<T>& state, int head, Piece (&pieces)[T::kOwned]) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& sum = state.sum[n][j];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
      }
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);  // the last merge has been read
    float* rows = merge_rows() + warp_ * T::kHeads * T::kMergeStride;
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n) {
      if (8 * n < active_heads(head)) {
#pragma unroll
        for (int d = 0; d < WarpState<T>::kSteps; ++d)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float* row = rows + (8 * n + 2 * t + j) * T::kMergeStride + 16 * d;
            if constexpr (T::kFp8) {
              *reinterpret_cast<float2*>(row + 2 * g) = make_float2(state.out[d][n][j], state.out[d][n][j + 2]);
            } else {
              row[g] = state.out[d][n][j];
              row[g + 8] = state.out[d][n][j + 2];
            }
          }
      }
      if (g == 0)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          stats()[warp_ * T::kHeads + 8 * n + 2 * t + j] = make_float2(state.maximum[n][j], state.sum[n][j]);
    }
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);
    for_owned(head, [&](int i, int row, int dim) {
      Piece all;
      float2 stat[T::kConsumerWarps];
#pragma unroll
      for (int w = 0; w < T::kConsumerWarps; ++w) {
        stat[w] = stats()[w * T::kHeads + row];
        all.maximum = fmaxf(all.maximum, stat[w].x);
      }
#pragma unroll
      for (int w = 0; w < T::kConsumerWarps; ++w) {
        const float weight = ptx::exp2_approx(stat[w].x - all.maximum);
        const float4 out = *reinterpret_cast<const float4*>(merge_rows() + (w * T::kHeads + row) * T::kMergeStride + dim);
        all.sum = __fmaf_rn(stat[w].y, weight, all.sum);
        all.out.x = __fmaf_rn(out.x, weight, all.out.x);
        all.out.y = __fmaf_rn(out.y, weight, all.out.y);
        all.out.z = __fmaf_rn(out.z, weight, all.out.z);
        all.out.w = __fmaf_rn(out.w, weight, all.out.w);
      }
      fold(pieces[i], all.maximum, all.sum, all.out);
    });
  }

  __device__ __forceinline__ void write_pieces(int sequence, int head, const Piece (&pieces)[T::kOwned]) const {
    for_owned(head, [&](int i, int row, int dim) {
      write_final(p_, k_.out_vectors, sequence, first_query_head(head) + row, dim, pieces[i]);
    });
  }

  // Sequences without keys get no work: zeros, and -inf for their LSE.
  __device__ void clear_empty_sequences() const {
    for (int b = blockIdx.x; b < p_.sequences.batch; b += gridDim.x)
      if (prefix()[b] == prefix()[b + 1])
        for (int head = 0; head < k_.heads; ++head) {
          const Piece nothing[T::kOwned];
          write_pieces(b, head, nothing);
        }
  }

  // --- combine through the workspace --------------------------------------------------------------------
  __device__ __forceinline__ float* partial(int slot) const {
    return static_cast<float*>(p_.workspace) + static_cast<int64_t>(slot) * T::kPartialFloats;
  }

  // Layout of a result that others read: [head][dim], then (maximum, sum) [head].
  __device__ __forceinline__ void put_partial(float* target, int head, const Piece (&pieces)[T::kOwned]) const {
    for_owned(head, [&](int i, int row, int dim) {
      *reinterpret_cast<float4*>(target + row * T::kHeadDim + dim) = pieces[i].out;
      if (dim == 0)
        reinterpret_cast<float2*>(target + T::kHeads * T::kHeadDim)[row] =
            make_float2(pieces[i].maximum, pieces[i].sum);
    });
  }

  // Counts blocks, so that it does not matter how many CTAs share a head. Resets itself.
  __device__ __forceinline__ bool arrive_last(const Place& place, int count) {
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);  // every thread's partials are written
    if (threadIdx.x == 0) {
      int32_t* counter = p_.counters + place.sequence * k_.heads + place.head;
      const bool last = ptx::atomic_add_acq_rel(counter, count) + count == place.num_blocks;
      if (last) *counter = 0;
      is_last() = last;
    }
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);
    return is_last() != 0;
  }

  // Lists the slots that hold parts of this head, in order; `start` is its first position in the line.
  __device__ __forceinline__ int list_slots(const Line& line, const Place& place, int start, int slots) {
    const int first = line.owner(start);
    if (!p_.deterministic) {
      const int count = line.owner(start + place.num_blocks - 1) - first + 1;
      for (int i = threadIdx.x; i < count; i += T::kConsumers) list()[i] = (first + i) * slots + (i == 0);
      return count;
    }
    const int step = unit_blocks(place.num_blocks);
    const int units = (place.num_blocks + step - 1) / step;
    const int owner = lane_ < units ? line.owner(start + lane_ * step) : -1 - lane_;
    const uint32_t same = __match_any_sync(~0u, owner);
    const bool counted = lane_ < units && (owner != first || lane_ == 0);
    const uint32_t all = __ballot_sync(~0u, counted);
    if (warp_ == 0 && counted)
      list()[__popc(all & ((1u << lane_) - 1))] =
          owner * slots + (owner == first ? slots - 1 : lane_ - (__ffs(same) - 1));
    return __popc(all);
  }

  __device__ __forceinline__ void combine_line(const Line& line, const Place& place, int start, int slots) {
    const int count = list_slots(line, place, start, slots);
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);
    constexpr int kBatch = 8;  // loads in flight
    const int vectors = active_heads(place.head) * (T::kHeadDim / 4);
#pragma unroll 1
    for (int v = threadIdx.x; v < vectors; v += T::kConsumers) {
      const int row = v / (T::kHeadDim / 4), dim = v % (T::kHeadDim / 4) * 4;
      Piece all;
#pragma unroll 1
      for (int base = 0; base < count; base += kBatch) {
        float4 out[kBatch];
        float2 stat[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (base + j < count) {
            const float* source = partial(list()[base + j]);
            out[j] = __ldcg(reinterpret_cast<const float4*>(source + row * T::kHeadDim + dim));
            stat[j] = __ldcg(reinterpret_cast<const float2*>(source + T::kHeads * T::kHeadDim) + row);
          }
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (base + j < count) fold(all, stat[j].x, stat[j].y, out[j]);
      }
      write_final(p_, k_.out_vectors, place.sequence, first_query_head(place.head) + row, dim, all);
    }
    ptx::named_barrier(kConsumerBarrier, T::kConsumers);  // the list may be written again
  }

  // --- combine through distributed shared memory ----------------------------------------------------------
  __device__ __forceinline__ int cluster_head() const { return blockIdx.x / k_.cluster % k_.heads; }

  // Each CTA of the cluster finishes its share of the outputs. All threads.
  __device__ __forceinline__ void combine_cluster() const {
    if constexpr (T::Loader::kClusters) {
      constexpr int kMaxCluster = 8;
      __syncwarp();
      ptx::cluster_sync();  // everyone's result is in its exchange
      const int sequence = blockIdx.x / k_.cluster / k_.heads, head = cluster_head();
      const int vectors = active_heads(head) * (T::kHeadDim / 4);
      const uint32_t here = ptx::smem_address(exchange());
#pragma unroll 1
      for (int v = ptx::cluster_rank() + k_.cluster * threadIdx.x; v < vectors; v += k_.cluster * T::kThreads) {
        const int row = v / (T::kHeadDim / 4), dim = v % (T::kHeadDim / 4) * 4;
        float4 out[kMaxCluster];
        float2 stat[kMaxCluster];
#pragma unroll
        for (int r = 0; r < kMaxCluster; ++r)
          if (r < k_.cluster) {
            const uint32_t there = ptx::map_shared(here, r);
            out[r] = ptx::load_cluster_float4(there + (row * T::kHeadDim + dim) * 4);
            stat[r] = ptx::load_cluster_float2(there + T::kHeads * T::kHeadDim * 4 + row * 8);
          }
        Piece all;
#pragma unroll
        for (int r = 0; r < kMaxCluster; ++r)
          if (r < k_.cluster) fold(all, stat[r].x, stat[r].y, out[r]);
        write_final(p_, k_.out_vectors, sequence, first_query_head(head) + row, dim, all);
      }
      ptx::cluster_sync();  // shared memory must outlive its readers
    }
  }

  // --- shared memory ------------------------------------------------------------------------------------
  using Plan = SharedPlan<T>;
  __device__ __forceinline__ float* merge_rows() const { return reinterpret_cast<float*>(shared_); }
  __device__ __forceinline__ float2* stats() const { return reinterpret_cast<float2*>(shared_ + Plan::kStats); }
  __device__ __forceinline__ int* list() const { return reinterpret_cast<int*>(shared_ + Plan::kList); }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return ptx::smem_address(shared_ + Plan::kBarriers) + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ int& longest() const { return *reinterpret_cast<int*>(shared_ + Plan::kScalars); }
  __device__ __forceinline__ int& is_last() const { return *(&longest() + 1); }
  __device__ __forceinline__ uint32_t ring(int stage) const {
    return ptx::smem_address(shared_ + Plan::kRing) + stage * T::kStageBytes;
  }
  // A cluster's results, in the ring once it is empty.
  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(shared_ + Plan::kRing); }
  __device__ __forceinline__ int* prefix() const {
    return reinterpret_cast<int*>(shared_ + Plan::kRing + k_.stages * T::kStageBytes);
  }

  const KernelParams& k_;
  const DecodeParams& p_;
  char* const shared_;
  const int warp_, lane_;
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) decode_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) char shared[];
  DecodeCta<T>(params, shared).run();
}

}  // namespace bicl::decode
