// Divides batches as decode_attention's CTAs do, and checks that the shares add up.
//
// Arguments: grid, heads, CTAs of a team, a head's charge (end, least), groups of the ring if deterministic, else 0,
// window, then the lengths. Prints each CTA's begin and end.
#include "warp.h"
#include "require.h"

namespace bicl::decode {
constexpr int kBlockKeys = 64;
}
#include "share.cuh"

using namespace bicl;
using namespace bicl::decode;

// Each CTA's blocks and where they lie, found 32 at a time as the kernel does.
void check_blocks(const std::vector<int32_t>& lengths, int heads, const Teams& teams, int window, bool deterministic,
                  int multiple, const Charge& charge) {
  const int batch = static_cast<int>(lengths.size()), width = *std::max_element(lengths.begin(), lengths.end()) / 64 + 1;
  std::vector<int32_t> table(batch * width);
  std::iota(table.begin(), table.end(), 0);
  KernelParams k{};
  k.heads = FastDiv(heads);
  k.teams = teams;
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
    for (unsigned cta = 0; cta < teams.size.divisor * teams.count.divisor; ++cta) {
      blockIdx.x = cta;
      const Line line = divider.line(entries.data());
      const Share share = divider.line_share(line);
      if (share.begin == share.end) continue;
      const Place first = line.place(share.position(share.begin), 0);
      REQUIRE(share.first.sequence == first.sequence && share.first.head == first.head);
      REQUIRE(share.first.block == first.block && share.first.num_blocks == first.num_blocks);
      // A head that begins in a share with others and ends in another's goes first.
      const Place last = line.place(share.end - 1, 0);
      const int begun = last.block + 1;
      const bool split = begun < last.num_blocks && begun < share.end - share.begin;
      REQUIRE(share.split == (split ? begun : 0));
      int sequence = share.hint();
      for (int x = share.begin; x < share.end; x += 32) {
        __syncwarp();
        blocks[lane] = divider.block_of_lane(line, share, x, sequence);
        __syncwarp();
        for (int j = 0; j < 32 && x + j < share.end; ++j) {
          const Place place = line.place(share.position(x + j), 0);
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

// The blocks of one member of every team, in the order of its line.
void check_line(const std::vector<int32_t>& lengths, const Entry* entries, const Teams& teams, unsigned member,
                const std::vector<Bounds>& shares, int window, bool deterministic, int multiple,
                const Charge& charge) {
  const int batch = static_cast<int>(lengths.size()), size = teams.size.divisor, count = teams.count.divisor;
  const Line line(entries, batch, teams, member, deterministic, multiple, charge);
  std::vector<int> owners(entries[batch].before * teams.heads);
  int x = 0;
  for (int team = 0; team < count; ++team) {
    const Bounds& bounds = shares[team * size + member];
    REQUIRE(bounds.begin == x);
    for (; x < bounds.end; ++x) owners[x] = team;
  }
  REQUIRE(x == static_cast<int>(owners.size()));
  Place next{};
  x = 0;
  for (int sequence = 0; sequence < batch; ++sequence) {
    const int blocks = visible_span(lengths[sequence], window, multiple).num_blocks;
    for (int head = member; head < teams.heads * size; head += size)
      for (int block = 0; block < blocks; ++block, ++x) {
        const Place place = line.place(x, shares[owners[x] * size + member].sequence);
        REQUIRE(place.sequence == sequence && place.head == head && place.block == block);
        REQUIRE(place.num_blocks == blocks && place.length == lengths[sequence]);
        if (block == 0 && x > 0)
          REQUIRE(next.sequence == sequence && next.head == head && next.num_blocks == blocks);
        // The parts of a head are taken from all teams between its first and its last.
        if (!deterministic && block > 0) REQUIRE(owners[x] <= owners[x - 1] + 1);
        if (!deterministic || block % unit_blocks(blocks, multiple) == 0) {
          REQUIRE(line.owner(place, block) == owners[x] * size + static_cast<int>(member));
        } else {
          REQUIRE(owners[x] == owners[x - 1]);
        }
        if (block == blocks - 1 && x + 1 < static_cast<int>(owners.size())) next = line.after(place);
      }
  }
  REQUIRE(x == static_cast<int>(owners.size()));
}

int main(int count, char** arguments) {
  const auto number = [&](int i) { return std::atoi(arguments[i]); };
  const int grid = number(1), heads = number(2), team = number(3), groups = number(6), window = number(7);
  const Charge charge{number(4), number(5)};
  const bool deterministic = groups > 0;
  std::vector<int32_t> lengths;
  for (int i = 8; i < count; ++i) lengths.push_back(number(i));
  const int batch = static_cast<int>(lengths.size()), multiple = deterministic ? groups : 1;
  REQUIRE(heads % team == 0 && grid % team == 0);
  const Teams teams{FastDiv(team), FastDiv(grid / team), heads / team};
  Sequences sequences{};
  sequences.cache_seqlens = lengths.data();
  sequences.batch = batch;
  std::vector<Entry> entries(batch + 1);
  std::vector<Bounds> shares(grid);
  warp::run([&](int) {
    build_entries(entries.data(), sequences, window, multiple, charge);
    __syncwarp();
    for (int cta = 0; cta < grid; ++cta) {
      const Bounds bounds = Line(entries.data(), batch, teams, cta, deterministic, multiple, charge).share();
      if (threadIdx.x == 0) shares[cta] = bounds;
    }
  });
  for (const Bounds& bounds : shares) std::printf("%d %d\n", bounds.begin, bounds.end);
  for (int member = 0; member < team; ++member)
    check_line(lengths, entries.data(), teams, member, shares, window, deterministic, multiple, charge);
  check_blocks(lengths, heads, teams, window, deterministic, multiple, charge);
}
