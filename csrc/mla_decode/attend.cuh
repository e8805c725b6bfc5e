// One tile of keys: scores, softmax, outputs.
#pragma once

#include "multiply.cuh"
#include "result.cuh"

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

template <typename T>
class Attender : protected Results<T> {
 protected:
  using Base = Results<T>;
  using typename Base::Cursor;
  using typename Base::Element;
  using typename Base::State;
  using Base::base_;
  using Base::p_;
  using Base::shared_;
  using Base::empty;
  using Base::factors;
  using Base::full;
  using Base::head_block;
  using Base::maxima;
  using Base::stage;
  using Base::warpgroup;
  using Base::Base;

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
};

}  // namespace bicl::mla
