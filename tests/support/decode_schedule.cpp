// Divides batches as decode_attention's CTAs do, and checks that the shares add up.
//
// Arguments: grid, heads, least charge, deterministic, window, then the lengths. Prints each CTA's begin and end.
#include "warp.h"

#include <cstdio>
#include <cstdlib>

namespace bicl::decode {
constexpr int kBlockKeys = 64;
}
#include "schedule_without_traits.cuh"

using namespace bicl;
using namespace bicl::decode;

#define REQUIRE(condition)                                                \
  if (!(condition)) {                                                     \
    std::fprintf(stderr, "line %d: " #condition "\n", __LINE__);          \
    std::abort();                                                         \
  }

int main(int count, char** arguments) {
  const auto number = [&](int i) { return std::atoi(arguments[i]); };
  const int grid = number(1), heads = number(2), least = number(3), deterministic = number(4), window = number(5);
  std::vector<int32_t> lengths;
  for (int i = 6; i < count; ++i) lengths.push_back(number(i));
  const int batch = static_cast<int>(lengths.size()), multiple = deterministic ? 2 : 1;
  Sequences sequences{};
  sequences.cache_seqlens = lengths.data();
  sequences.batch = batch;
  std::vector<Entry> entries(batch + 1);
  std::vector<Bounds> shares(grid);
  const FastDiv divide(grid);
  warp::run([&](int) {
    build_entries(entries.data(), sequences, window, multiple, least);
    __syncwarp();
    const Line line(entries.data(), batch, heads, divide, deterministic, least);
    for (int cta = 0; cta < grid; ++cta) {
      const Bounds bounds = line.share_of(cta);
      if (threadIdx.x == 0) shares[cta] = bounds;
    }
  });
  const Line line(entries.data(), batch, heads, divide, deterministic, least);
  int x = 0;
  Place next{};
  bool first = true;
  std::vector<int> owners(entries[batch].before * heads);
  for (int cta = 0; cta < grid; ++cta) {
    REQUIRE(shares[cta].begin == x);
    std::printf("%d %d\n", shares[cta].begin, shares[cta].end);
    for (; x < shares[cta].end; ++x) owners[x] = cta;
  }
  x = 0;
  for (int sequence = 0; sequence < batch; ++sequence) {
    const int blocks = visible_span(lengths[sequence], window, multiple).num_blocks;
    for (int head = 0; head < heads; ++head)
      for (int block = 0; block < blocks; ++block, ++x) {
        const Place place = line.place(x, shares[owners[x]].sequence);
        REQUIRE(place.sequence == sequence && place.head == head && place.block == block);
        REQUIRE(place.num_blocks == blocks && place.length == lengths[sequence]);
        if (block == 0 && !first)
          REQUIRE(next.sequence == sequence && next.head == head && next.num_blocks == blocks);
        if (!deterministic || block % unit_blocks(blocks) == 0) {
          REQUIRE(line.owner(place, block) == owners[x]);
        } else {
          REQUIRE(owners[x] == owners[x - 1]);
        }
        first = false;
        if (block == blocks - 1 && x + 1 < static_cast<int>(owners.size())) next = line.after(place);
      }
  }
  REQUIRE(x == static_cast<int>(owners.size()));
}
