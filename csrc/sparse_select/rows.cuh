// The index of an octet of pages on its way to a warp, some octets ahead, through a ring in shared memory: of a page and
// head its rows, and behind them what belongs to each (a and b, then keys and spreads).
#pragma once

#include "dot.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

// Of a page, what belongs to each of its rows, as stored.
template <int kCentroids>
struct RowFacts {
  uint4 affine[kCentroids / 4];   // half2 (a, b) each
  uint32_t facts[kCentroids / 2];  // of two: keys as a byte, spread as e5m2
};

template <typename Context>
class RowRing {
  using Shape = typename Context::Shape;
  static constexpr int kCentroids = Shape::kCentroids;

 public:
  __device__ __forceinline__ explicit RowRing(const Context& c)
      : c_(c), chunks_(kCentroids * c.p.index.row_bytes / kPieceBytes),
        ring_(c.shared.ring + c.warp * c.k.page_stride * kOctet * Shape::kDepth) {}

  // id_of(place): page of the octet, -1 where there is none. The octet kDepth earlier must have been used up.
  template <typename IdOf>
  __device__ __forceinline__ void ask(int octet, const IdOf& id_of) const {
    const auto copy = [&](int place, int chunk) {
      const int32_t id = id_of(place);
      if (id >= 0)
        ptx::cp_async_16(ptx::smem_address(page(octet, place)) + chunk * kPieceBytes,
                         record(id) + (c_.head * chunks_ + chunk) * kPieceBytes);
    };
    if (chunks_ == 32) {
#pragma unroll
      for (int place = 0; place < kOctet; ++place) copy(place, c_.lane);
    } else if (chunks_ == 16) {
#pragma unroll
      for (int place = 0; place < kOctet; place += 2) copy(place + c_.lane / 16, c_.lane % 16);
    } else {
#pragma unroll 1
      for (int i = c_.lane; i < kOctet * chunks_; i += 32) copy(i / chunks_, i % chunks_);
    }
    // A lane of each four a chunk of a and b, or of facts.
    const int place = c_.lane / 4, piece = c_.lane % 4;
    const int32_t id = id_of(place);
    if (id >= 0) {
      const int rows = c_.p.num_kv_heads * kCentroids, own = c_.head * kCentroids;
      const uint8_t* affine = record(id) + rows * c_.p.index.row_bytes + own * 4;
      const uint8_t* facts = record(id) + rows * (c_.p.index.row_bytes + 4) + own * 2;
      const uint32_t target = ptx::smem_address(page(octet, place)) + chunks_ * kPieceBytes;
      if (piece < kCentroids / 4) ptx::cp_async_16(target + piece * 16, affine + piece * 16);
      else if (kCentroids == 8 && piece == 2) ptx::cp_async_16(target + 32, facts);
      else if (kCentroids == 4 && piece >= 2) ptx::cp_async_4(target + 16 + (piece - 2) * 4, facts + (piece - 2) * 4);
    }
    ptx::cp_async_commit();
  }

  // kLater: octets that were asked for after the one that is waited for.
  template <int kLater>
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait<kLater>();
    __syncwarp();
  }

  // Of page lane / 4. What belongs to no page means nothing.
  __device__ __forceinline__ void load(PagePieces<kCentroids>& pieces, int octet, int step) const {
    load_pieces(pieces, page(octet, c_.lane / 4), c_.p.index.row_bytes, step, c_.lane);
  }
  __device__ __forceinline__ void load(RowFacts<kCentroids>& facts, int octet) const {
    const auto* from = reinterpret_cast<const uint4*>(page(octet, c_.lane / 4) + chunks_ * kPieceBytes);
#pragma unroll
    for (int i = 0; i < kCentroids / 4; ++i) facts.affine[i] = from[i];
#pragma unroll
    for (int i = 0; i < kCentroids / 2; ++i) facts.facts[i] = reinterpret_cast<const uint32_t*>(from + kCentroids / 4)[i];
  }

 private:
  __device__ __forceinline__ const uint8_t* record(int32_t id) const {
    return c_.p.index.records + id * c_.p.index.record_bytes;
  }
  __device__ __forceinline__ char* page(int octet, int place) const {
    return ring_ + (octet % Shape::kDepth * kOctet + place) * c_.k.page_stride;
  }

  const Context& c_;
  const int chunks_;  // of 16 bytes, of a page's rows
  char* const ring_;
};

}  // namespace bicl::sparse
