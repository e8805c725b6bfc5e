// Decode attention over latent pages on Hopper: a producer warp, two warpgroups that multiply.
//
// Products are transposed: keys are the 64 rows of S^T = K Q^T, and value dims those of O^T = V^T P^T, so that 16 heads
// fill a wgmma of 16 columns, and a page's tiles are its operands as they lie. Each warpgroup sums the scores over half of
// the dims, adds what the other has for half of the heads, and computes their softmax; through shared memory both get all
// probabilities, and each computes half of the value dims.
#pragma once

#include "combine.cuh"
#include "multiply.cuh"
#include "traits.cuh"

namespace bicl::mla {

constexpr float kLog2E = 1.f / kLn2;
// Exponents may rise so far above the reference (in log2) before it follows: then P is 256 at most, which fp16 holds.
constexpr float kHeadroom = 8.f;

// Stores two 8 x 8 matrices transposed.
__device__ __forceinline__ void store_matrices_trans(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// A barrier that also tells whether the predicate holds for any of the threads.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(predicate)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// The same in all lanes, and ptxas may know it: descriptors then live in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

template <typename T>
class Cta {
  using Element = typename T::Element;

 public:
  __device__ __forceinline__ Cta(const MlaDecodeParams& p, char* shared)
      : p_(p), shared_(shared), base_(ptx::smem_address(shared)),
        entries_(reinterpret_cast<int*>(shared + T::kEntries), p.sequences.batch) {}

  __device__ __forceinline__ void run() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (p_.pdl) {
      ptx::grid_dependency_wait();
      ptx::grid_launch_dependents();
    }
    if (warp == kConsumers / 32) {
      touch_table(lane);
      entries_.build(p_.sequences.cache_seqlens, lane);
    } else if (threadIdx.x == 0) init_barriers();
    __syncthreads();
    const Teams teams = this->teams();
    const int begin = teams.begin(team()), end = teams.begin(team() + 1);
    if (warp >= kConsumers / 32) {
      if constexpr (T::kMoveRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
      if (warp == kConsumers / 32) produce(begin, end, lane);
      else if (warp == kConsumers / 32 + 1 && begin < end) publish_ends();
    } else {
      if constexpr (T::kMoveRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;" ::: "memory");
      if (begin < end) {
        consume(begin, end);
        combine_ends();
      }
      clear_empty_sequences();
    }
  }

 private:
  __device__ __forceinline__ static int warpgroup() { return uniform(threadIdx.x / 128); }
  __device__ __forceinline__ Teams teams() const {
    return Teams(gridDim.y, entries_.total());
  }
  // Of the query, served by this CTA; the team's other CTAs serve the others.
  __device__ __forceinline__ int head_block() const { return blockIdx.x; }
  __device__ __forceinline__ int team() const { return blockIdx.y; }
  __device__ __forceinline__ uint32_t stage(int i) const { return base_ + T::kRing + i * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int i) const { return base_ + T::kBarriers + i * 16; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ float* maxima() const { return reinterpret_cast<float*>(shared_ + T::kStats); }
  __device__ __forceinline__ float* sums() const { return maxima(); }  // [warp of a group][head], at other times
  __device__ __forceinline__ float* references() const { return maxima() + 4 * T::kHeads; }
  __device__ __forceinline__ float* factors() const { return references() + T::kHeads; }

  __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), kConsumers / 32 * ptx::kWarpArrivals);
    }
    ptx::fence_barrier_init();
  }

  // A position in the ring.
  struct Cursor {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int count = 1) {
      stage += count;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    }
  };

  // --- producer -------------------------------------------------------------------------------------
  struct Source {
    int page = 0, keys = 0;
  };

  __device__ __forceinline__ Source source(int tile, int end) const {
    if (tile >= end) return {};
    const int sequence = entries_.sequence_of(tile);
    const int64_t entry = sequence * p_.sequences.page_table_stride + tile - entries_.first_tile(sequence);
    return {p_.sequences.page_table[entry], entries_.keys(sequence, tile)};
  }

  // Asks for the start of the page list that this CTA reads if lengths are even, while the lengths are on their way.
  __device__ __forceinline__ void touch_table(int lane) const {
    constexpr int kLine = 128 / sizeof(int32_t);
    const int sequence = team() * p_.sequences.batch / gridDim.y;
    if (lane * kLine >= p_.table_columns) return;
    int32_t unused;
    asm volatile("ld.global.s32 %0, [%1];"
                 : "=r"(unused)
                 : "l"(p_.sequences.page_table + sequence * p_.sequences.page_table_stride + lane * kLine));
  }

  __device__ __forceinline__ void produce(int begin, int end, int lane) const {
    const uint64_t policy = ptx::evict_first_policy();
    Cursor cursor{0, 1};  // the first round finds its stages empty
    Source next = source(begin + lane, end);
#pragma unroll 1
    for (int x = begin; x < end; x += 32) {
      const Source own = next;
      const int count = min(32, end - x);
#pragma unroll 1
      for (int turn = 0; turn < count; ++turn) {
        const int page = __shfl_sync(~0u, own.page, turn), keys = __shfl_sync(~0u, own.keys, turn);
        if (lane == 0) copy_page(cursor, page, keys, policy);
#pragma unroll
        for (int i = 0; i < kStagesPage; ++i) cursor.advance();
        if (turn == min(2, count - 1)) next = source(x + 32 + lane, end);
      }
    }
  }

  __device__ __forceinline__ void copy_page(Cursor cursor, int page, int keys, uint64_t policy) const {
    const char* data = static_cast<const char*>(p_.pages) + static_cast<int64_t>(page) * (kDimTiles * kTileBytes);
#pragma unroll 1
    for (int part = 0; part < kStagesPage; ++part, data += kStageBytes) {
      ptx::mbarrier_wait(empty(cursor.stage), cursor.parity);
      if (keys == kTileKeys) {
        ptx::mbarrier_expect_tx(full(cursor.stage), kStageBytes);
        ptx::bulk_copy(stage(cursor.stage), data, kStageBytes, full(cursor.stage), policy);
      } else {
        ptx::mbarrier_expect_tx(full(cursor.stage), kStageTiles * keys * 128);
#pragma unroll 1
        for (int tile = 0; tile < kStageTiles; ++tile)
          ptx::bulk_copy(stage(cursor.stage) + tile * kTileBytes, data + tile * kTileBytes, keys * 128,
                         full(cursor.stage), policy);
      }
      cursor.advance();
    }
  }

  // --- consumers ------------------------------------------------------------------------------------
  // What a thread knows about the tiles of one segment so far. Accumulators: row = value dim, column = head.
  struct State {
    float out[kValueTiles][T::kBlocks * 4];
    float reference[T::kOwnBlocks][2];  // of its columns' exponents, in log2
    float sum[T::kOwnBlocks][2];        // of probabilities of its rows

    __device__ __forceinline__ void reset() {
#pragma unroll
      for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) reference[j][e] = -INFINITY, sum[j][e] = 0.f;
    }
  };

  __device__ __forceinline__ void consume(int begin, int end) const {
    Cursor cursor;
    State state;
    int sequence = entries_.sequence_of(begin);
    copy_query(sequence);
#pragma unroll 1
    for (int x = begin; x < end;) {
      const bool from_start = x == entries_.first_tile(sequence);
      const int stop = min(end, entries_.first_tile(sequence + 1));
      state.reset();
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::named_barrier(kAll, kConsumers);
#pragma unroll 1
      for (bool start = true; x < stop; ++x, start = false) {
        const bool ends = x + 1 == stop;
        attend(cursor, ends ? entries_.keys(sequence, x) : kTileKeys, start, state, [&] {
          if (ends && stop < end) copy_query(entries_.next(sequence));
        });
      }
      finish(state, sequence, from_start && stop == entries_.first_tile(sequence + 1), from_start);
      if (x < end) sequence = entries_.next(sequence);
    }
  }

  // Rows of a sequence's query as wgmma wants them; those past the last head are zeros.
  __device__ __forceinline__ void copy_query(int sequence) const {
    constexpr int kRowChunks = kLatentDim / 8, kTileChunks = 64 / 8;
    const int first_head = head_block() * T::kHeads;
    const Element* query = static_cast<const Element*>(p_.query) + sequence * p_.query_token_stride;
#pragma unroll
    for (int i = threadIdx.x; i < T::kHeads * kRowChunks; i += kConsumers) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const bool valid = first_head + row < p_.num_heads;
      const Element* source = query + (valid ? first_head + row : 0) * p_.query_head_stride + chunk * 8;
      ptx::cp_async_16(base_ + T::kQuery + chunk / kTileChunks * T::kQueryTile + row * 128 +
                           (chunk % kTileChunks ^ (row & 7)) * 16,
                       source, valid);
    }
    ptx::cp_async_commit();
  }

  // One tile of keys. `scored` runs when nobody reads the query any more.
  template <typename Scored>
  __device__ __forceinline__ void attend(Cursor& cursor, int keys, bool start, State& state,
                                         const Scored& scored) const {
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float score[T::kOwnBlocks][4];  // of log2
    compute_scores(cursor, score);
    uint32_t stages[kStagesPage];
#pragma unroll
    for (int part = 0; part < kStagesPage; ++part) {
      Cursor at = cursor;
      at.advance(part);
      stages[part] = stage(at.stage);
    }
    if (keys < kTileKeys) {
      const int row = warp * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (row + i / 2 * 8 >= keys) score[j][i] = -INFINITY;
      clear_values(stages, keys);
    }
    const bool risen = write_weights(score, state);
    ptx::fence_proxy_async();
    if (barrier_any(kAll, kConsumers, risen)) {
      raise(score, start, state);
      write_weights(score, state);
      ptx::fence_proxy_async();
      ptx::named_barrier(kAll, kConsumers);
      if (!start) scale_output(state);
    }
    scored();
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) wgmma::hold(state.out[i]);
    wgmma::fence();
    uint32_t values[kValueTiles];
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      // The stage is picked by arithmetic, as a register array takes no index.
      const int low = i, high = kValueTiles + i;
      values[i] = uniform(wgmma::descriptor(group == 0 ? stages[low / kStageTiles] + low % kStageTiles * kTileBytes
                                                       : stages[high / kStageTiles] + high % kStageTiles * kTileBytes));
    }
    const uint32_t probabilities = uniform(wgmma::descriptor(base_ + T::kWeights));
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i)
        multiply<1>(state.out[i], values[i] + k * (16 * 128 >> 4), probabilities + k * 2, !start || k > 0, Element{});
    wgmma::commit();
    add_weights(score, state);
    wgmma::wait<0>();
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) wgmma::hold(state.out[i]);
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kStagesPage; ++part) {
      ptx::mbarrier_arrive_warp(empty(cursor.stage), lane);
      cursor.advance();
    }
  }

  // Scores of own heads, in log2. The first warpgroup sums over tiles 0 to 3 and half of tile 4, the second over the
  // rest, so that both read one part of the page, then the middle one.
  __device__ __forceinline__ void compute_scores(const Cursor& cursor, float (&score)[T::kOwnBlocks][4]) const {
    const int group = warpgroup();
    float chain[T::kChains][T::kBlocks * 4];
    const int first_part = group * (kStagesPage - 1), third_tile = group == 0 ? 3 : 5;
    const uint32_t query = wgmma::descriptor(base_ + T::kQuery);
    constexpr int kQueryTile = T::kQueryTile >> 4, kTile = kTileBytes >> 4;
    int index = 0;  // of a step of 16 dims
    const auto multiply_tile = [&](uint32_t keys, uint32_t queries, int steps) {
#pragma unroll
      for (int k = 0; k < steps; ++k, ++index)
        multiply<0>(chain[index % T::kChains], keys + k * 2, queries + k * 2, index >= T::kChains, Element{});
    };
    Cursor first = cursor, middle = cursor;
    first.advance(first_part), middle.advance(1);
    ptx::mbarrier_wait(full(first.stage), first.parity);
    wgmma::fence();
    const uint32_t keys = uniform(wgmma::descriptor(stage(first.stage)));
    const uint32_t queries = uniform(query + first_part * kStageTiles * kQueryTile);
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile)
      multiply_tile(keys + tile * kTile, queries + tile * kQueryTile, 4);
    ptx::mbarrier_wait(full(middle.stage), middle.parity);
    wgmma::fence();
    const uint32_t middle_keys = uniform(wgmma::descriptor(stage(middle.stage)));
    multiply_tile(uniform(middle_keys + (third_tile - 3) * kTile), uniform(query + third_tile * kQueryTile), 4);
    multiply_tile(uniform(middle_keys + kTile + group * 4), uniform(query + 4 * kQueryTile + group * 4), 2);
    wgmma::commit();
    wgmma::wait<0>();
#pragma unroll
    for (int i = 0; i < T::kChains; ++i) wgmma::hold(chain[i]);
#pragma unroll
    for (int i = 0; i < T::kBlocks * 4; ++i)
#pragma unroll
      for (int c = 1; c < T::kChains; ++c) chain[0][i] += chain[c][i];
    auto* exchange = reinterpret_cast<float4*>(shared_ + T::kExchange) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j) {
      float theirs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        theirs[i] = group == 0 ? chain[0][(T::kOwnBlocks + j) * 4 + i] : chain[0][j * 4 + i];
        score[j][i] = group == 0 ? chain[0][j * 4 + i] : chain[0][(T::kOwnBlocks + j) * 4 + i];
      }
      exchange[((1 - group) * T::kOwnBlocks + j) * 128] = make_float4(theirs[0], theirs[1], theirs[2], theirs[3]);
    }
    ptx::named_barrier(kAll, kConsumers);
    const float scale = p_.scale * kLog2E;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j) {
      const float4 v = exchange[(group * T::kOwnBlocks + j) * 128];
      score[j][0] = (score[j][0] + v.x) * scale, score[j][1] = (score[j][1] + v.y) * scale;
      score[j][2] = (score[j][2] + v.z) * scale, score[j][3] = (score[j][3] + v.w) * scale;
    }
  }

  // Exponentials to shared memory, [head][key]. Whether an exponent exceeds what the reference allows.
  __device__ __forceinline__ bool write_weights(const float (&score)[T::kOwnBlocks][4], const State& state) const {
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    bool risen = false;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float exponent = score[j][i] - state.reference[j][i % 2];
        risen |= exponent > kHeadroom;
        p[i] = ptx::exp2_approx(exponent);
      }
      const int row = lane % 8, chunk = warp * 2 + lane / 8 % 2;
      store_matrices_trans(base_ + T::kWeights + (group * T::kOwnHeads + j * 8 + row) * 128 + (chunk ^ row) * 16,
                           ptx::pack(p[0], p[1], Element{}), ptx::pack(p[2], p[3], Element{}));
    }
    return risen;
  }

  __device__ __forceinline__ void add_weights(const float (&score)[T::kOwnBlocks][4], State& state) const {
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.sum[j][i % 2] += ptx::exp2_approx(score[j][i] - state.reference[j][i % 2]);
  }

  // The references follow the greatest scores of this tile; what was summed before is to be multiplied by factors().
  __device__ __forceinline__ void raise(const float (&score)[T::kOwnBlocks][4], bool start, State& state) const {
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first = group * T::kOwnHeads + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = fmaxf(score[j][e], score[j][e + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        if (lane < 4) maxima()[warp * T::kHeads + first + j * 8 + e] = most;
      }
    ptx::named_barrier(kWarpgroup + group, 128);
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int head = first + j * 8 + e;
        float most = state.reference[j][e];
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, maxima()[i * T::kHeads + head]);
        if (most == -INFINITY) most = 0.f;
        const float factor = ptx::exp2_approx(state.reference[j][e] - most);
        state.reference[j][e] = most;
        state.sum[j][e] *= factor;
        if (!start && warp == 0 && lane < 4) factors()[head] = factor;
      }
  }

  __device__ __forceinline__ void scale_output(State& state) const {
#pragma unroll
    for (int j = 0; j < T::kBlocks; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(factors() + j * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        state.out[i][j * 4] *= factor.x, state.out[i][j * 4 + 1] *= factor.y;
        state.out[i][j * 4 + 2] *= factor.x, state.out[i][j * 4 + 3] *= factor.y;
      }
    }
  }

  // Values of slots nobody owns: their probabilities are zero, but zero times NaN is not.
  __device__ __forceinline__ void clear_values(const uint32_t (&stages)[kStagesPage], int keys) const {
    const int chunks = (kTileKeys - keys) * 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < chunks * (kValueDim / 64); i += kConsumers) {
      const int tile = i / chunks, part = tile / kStageTiles;
      const uint32_t start = part == 0 ? stages[0] : part == 1 ? stages[1] : stages[2];
      const uint32_t address = start + tile % kStageTiles * kTileBytes + keys * 128 + i % chunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    }
  }

  // --- results --------------------------------------------------------------------------------------
  __device__ __forceinline__ float* part(int of_team, bool from_start) const {
    return p_.workspace + (static_cast<int64_t>(of_team * gridDim.x + head_block()) * 2 + from_start) * T::kPartFloats;
  }

  // The end of a segment: its result if it is the whole sequence, else a part for combine_parts().
  __device__ __forceinline__ void finish(State& state, int sequence, bool whole, bool from_start) const {
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.sum[j][e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        const int head = group * T::kOwnHeads + j * 8 + lane % 4 * 2 + e;
        if (lane < 4) sums()[warp * T::kHeads + head] = sum;
        if (lane < 4 && warp == 0) references()[head] = state.reference[j][e];
      }
    ptx::named_barrier(kAll, kConsumers);
    const auto sum_of = [&](int head) {
      return sums()[head] + sums()[T::kHeads + head] + sums()[2 * T::kHeads + head] + sums()[3 * T::kHeads + head];
    };
    float* const target = part(team(), from_start);
    if (static_cast<int>(threadIdx.x) < T::kHeads) {
      const int head = threadIdx.x;
      const float sum = sum_of(head), reference = references()[head];
      if (!whole)
        reinterpret_cast<float2*>(target + T::kHeads * kValueDim)[head] = make_float2(reference, sum);
      else if (p_.lse != nullptr && head_block() * T::kHeads + head < p_.num_heads)
        p_.lse[static_cast<int64_t>(head_block() * T::kHeads + head) * p_.sequences.batch + sequence] =
            (reference + log2f(sum)) * kLn2;
    }
    if (whole) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
        const int column = j * 8 + lane % 4 * 2;
        const float inverse0 = 1.f / sum_of(column), inverse1 = 1.f / sum_of(column + 1);
        const int head = head_block() * T::kHeads + j * 8 + lane / 4;
        Element* out = static_cast<Element*>(p_.out) + sequence * p_.out_token_stride + head * p_.out_head_stride;
#pragma unroll
        for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t pair = ptx::movmatrix_trans(ptx::pack(state.out[i][j * 4 + half * 2] * inverse0,
                                                                 state.out[i][j * 4 + half * 2 + 1] * inverse1,
                                                                 Element{}));
            const int dim = (group * kValueTiles + i) * 64 + warp * 16 + half * 8 + lane % 4 * 2;
            if (head < p_.num_heads) *reinterpret_cast<uint32_t*>(out + dim) = pair;
          }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = j * 8 + lane % 4 * 2 + e % 2;
          const int dim = (group * kValueTiles + i) * 64 + warp * 16 + e / 2 * 8 + lane / 4;
          target[head * kValueDim + dim] = state.out[i][j * 4 + e];
        }
    ptx::named_barrier_arrive(kPublish + from_start, kConsumers + 32);
  }

  __device__ __forceinline__ int32_t* counter(int sequence) const {
    return p_.counters + sequence * gridDim.x + head_block();
  }

  // Slices of the sequences at this CTA's ends that it shares with others. Only when it has read all of its tiles: the
  // parts of the others are ready at about the same time.
  __device__ __forceinline__ void combine_ends() const {
    for_shared_ends([&](int sequence, bool, int first_team, int parts) {
      const Slice<T> slice{p_, sequence, head_block(), parts, team() - first_team};
      const Parts<T> all(part(first_team, true), gridDim.x * 2 * T::kPartFloats);
      combine(slice, all, counter(sequence), shared_ + T::kRing);
    });
  }

  // By a warp of its own, as the fence takes long: what the consumers wrote.
  __device__ __forceinline__ void publish_ends() const {
    for_shared_ends([&](int sequence, bool from_start, int, int) {
      ptx::named_barrier(kPublish + from_start, kConsumers + 32);
      if (threadIdx.x % 32 == 0) publish_part(counter(sequence));
    });
  }

  // The sequences at this CTA's ends that it shares with others:
  // visit(sequence, whether its start is here, first team, teams).
  template <typename Visit>
  __device__ __forceinline__ void for_shared_ends(const Visit& visit) const {
    const Teams teams = this->teams();
    const int begin = teams.begin(team()), end = teams.begin(team() + 1);
    const int last_sequence = entries_.sequence_of(end - 1);
    int sequence = entries_.sequence_of(begin);
#pragma unroll 1
    while (true) {
      const int first = entries_.first_tile(sequence), last = entries_.first_tile(sequence + 1);
      if (first < begin || end < last) {
        const int first_team = teams.owner(first);
        visit(sequence, begin <= first, first_team, teams.owner(last - 1) - first_team + 1);
      }
      if (sequence == last_sequence) return;
      sequence = last_sequence;
    }
  }

  // Sequences without keys get no work: zeros, and -inf for their LSE.
  __device__ __forceinline__ void clear_empty_sequences() const {
#pragma unroll 1
    for (int b = team(); b < p_.sequences.batch; b += gridDim.y) {
      if (!entries_.empty(b)) continue;
      const int first = head_block() * T::kHeads, heads = min(T::kHeads, p_.num_heads - first);
#pragma unroll 1
      for (int i = threadIdx.x; i < heads * (kValueDim / 4); i += kConsumers) {
        const int head = first + i / (kValueDim / 4);
        Element* out = static_cast<Element*>(p_.out) + b * p_.out_token_stride + head * p_.out_head_stride;
        *reinterpret_cast<uint2*>(out + i % (kValueDim / 4) * 4) = make_uint2(0, 0);
        if (p_.lse != nullptr && i % (kValueDim / 4) == 0)
          p_.lse[static_cast<int64_t>(head) * p_.sequences.batch + b] = -INFINITY;
      }
    }
  }

  const MlaDecodeParams& p_;
  char* const shared_;
  const uint32_t base_;
  const Entries entries_;
};

template <typename Element, int kHeads>
__global__ void __launch_bounds__(Traits<Element, kHeads>::kThreads, 1)
    decode_kernel(const __grid_constant__ MlaDecodeParams params) {
#ifndef BICL_NO_DEVICE_CODE  // a card outside the build; NVRTC makes it there
  extern __shared__ __align__(1024) char shared[];
  Cta<Traits<Element, kHeads>>(params, shared).run();
#endif
}

}  // namespace bicl::mla
