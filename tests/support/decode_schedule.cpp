// Divides batches as decode_attention's CTAs do, and checks that the shares add up.
//
// Arguments: grid, heads, a head's charge (end, least), groups of the ring if deterministic, else 0, window, then the
// lengths. Prints each CTA's begin and end.
#include "warp.h"
#include "require.h"

namespace bicl::decode {
constexpr int kBlockKeys = 64;
}
#include "share.cuh"

using namespace bicl;
using namespace bicl::decode;

// Each CTA's blocks and where they lie, found 32 at a time as the kernel does.
void check_blocks(const std::vector<int32_t>& lengths, int heads, int grid, int window, bool deterministic,
                  int multiple, const Charge& charge) {
  const int batch = static_cast<int>(lengths.size()), width = *std::max_element(lengths.begin(), lengths.end()) / 64 + 1;
  std::vector<int32_t> table(batch * width);
  std::iota(table.begin(), table.end(), 0);
  KernelParams k{};
  k.heads = FastDiv(heads);
  k.grid = FastDiv(grid);
  k.multiple = multiple;
  k.charge = charge;
  k.p.sequences.page_table = table.data();
  k.p.sequences.cache_seqlens = lengths.data();
  k.p.sequences.page_table_stride = width;
  k.p.sequences.batch = batch;
  k.p.pages.page_size = 64;
  k.p.window_left = window;
  k.p.deterministic = deterministic;
  std::vector<Entry> entries(batch + 1);
  std::vector<BlockSource> blocks(32);
  warp::run([&](int lane) {
    const Divider divider(k);
    divider.build_entries(entries.data());
    __syncwarp();
    const Line line = divider.line(entries.data());
    for (int cta = 0; cta < grid; ++cta) {
      blockIdx.x = cta;
      const Share share = divider.line_share(line);
      if (share.begin == share.end) continue;
      const Place first = line.place(share.begin, 0);
      REQUIRE(share.first.sequence == first.sequence && share.first.head == first.head);
      REQUIRE(share.first.block == first.block && share.first.num_blocks == first.num_blocks);
      int sequence = share.first.sequence;
      for (int x = share.begin; x < share.end; x += 32) {
        __syncwarp();
        blocks[lane] = divider.block_of_lane(line, share, x, sequence);
        __syncwarp();
        for (int j = 0; j < 32 && x + j < share.end; ++j) {
          const Place place = line.place(x + j, 0);
          const Span span = visible_span(place.length, window, 1);
          const int key = (span.first_block + place.block) * 64, left = place.length - key;
          REQUIRE(blocks[j].rows == std::clamp(left, 0, 64) && blocks[j].head == place.head);
          REQUIRE(blocks[j].newest == (left > 0 && left <= 64));
          if (left > 0) REQUIRE(blocks[j].page[0] == table[place.sequence * width + key / 64]);
        }
      }
    }
  });
}

int main(int count, char** arguments) {
  const auto number = [&](int i) { return std::atoi(arguments[i]); };
  const int grid = number(1), heads = number(2), groups = number(5), window = number(6);
  const Charge charge{number(3), number(4)};
  const bool deterministic = groups > 0;
  std::vector<int32_t> lengths;
  for (int i = 7; i < count; ++i) lengths.push_back(number(i));
  const int batch = static_cast<int>(lengths.size()), multiple = deterministic ? groups : 1;
  Sequences sequences{};
  sequences.cache_seqlens = lengths.data();
  sequences.batch = batch;
  std::vector<Entry> entries(batch + 1);
  std::vector<Bounds> shares(grid);
  const FastDiv divide(grid);
  warp::run([&](int) {
    build_entries(entries.data(), sequences, window, multiple, charge);
    __syncwarp();
    const Line line(entries.data(), batch, heads, divide, deterministic, multiple, charge);
    for (int cta = 0; cta < grid; ++cta) {
      const Bounds bounds = line.share_of(cta);
      if (threadIdx.x == 0) shares[cta] = bounds;
    }
  });
  const Line line(entries.data(), batch, heads, divide, deterministic, multiple, charge);
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
        // The parts of a head are taken from all CTAs between its first and its last.
        if (!deterministic && block > 0) REQUIRE(owners[x] <= owners[x - 1] + 1);
        if (!deterministic || block % unit_blocks(blocks, multiple) == 0) {
          REQUIRE(line.owner(place, block) == owners[x]);
        } else {
          REQUIRE(owners[x] == owners[x - 1]);
        }
        first = false;
        if (block == blocks - 1 && x + 1 < static_cast<int>(owners.size())) next = line.after(place);
      }
  }
  REQUIRE(x == static_cast<int>(owners.size()));
  check_blocks(lengths, heads, grid, window, deterministic, multiple, charge);
}
