// Plans a step as the card does, and checks that its tickets make up all of its work.
//
// Arguments: CTAs, KV heads, group, window to the left or -1, whether keys may be split, then new tokens and keys of
// each sequence. Prints, for each ticket, head, sequence, row, block_begin, block_end and pieces of its tile (0: not
// split).
#include "block.h"
#include "require.h"

#include <map>
#include <set>
#include <tuple>

namespace bicl::ptx {
inline void grid_dependency_wait() {}
inline void grid_launch_dependents() {}
}  // namespace bicl::ptx
#include "plan_kernel.cuh"

namespace bicl::prefill {
alignas(16) char raw[1 << 20];
}

using namespace bicl;
using namespace bicl::prefill;

int main(int argc, char** argv) {
  auto number = [&](int i) { return std::atoi(argv[i]); };
  const int ctas = number(1), heads = number(2), group = number(3), left = number(4);
  std::vector<int32_t> starts = {0}, keys;
  for (int i = 6; i + 1 < argc; i += 2) {
    starts.push_back(starts.back() + number(i));
    keys.push_back(number(i + 1));
  }
  const int batch = static_cast<int>(keys.size());
  const int max_tiles = (starts.back() * group + kPrefillRows - 1) / kPrefillRows + batch + 2 * ctas;
  const int max_partials = min(2 * ctas, kMaxPartials);

  PrefillHeader header;
  std::vector<PrefillTile> tiles(max_tiles + 1);
  std::vector<PrefillStart> first(ctas + 1);
  for (PrefillStart& start : first) start.head = start.tile.row = start.tile.query_len = -1;
  std::vector<int> entries(max_partials, -1), arrived(max_partials, -1), combined(max_partials, -1);
  PrefillPlanParams p{};
  p.cu_seqlens_q = starts.data();
  p.cache_seqlens = keys.data();
  p.plan = {&header, entries.data(), arrived.data(), combined.data(), tiles.data(), first.data(), nullptr, nullptr,
            1, max_tiles, max_partials};
  p.window = {left < 0 ? kUnlimited : left, 0};
  p.group = FastDiv(group);
  p.batch = batch;
  p.num_kv_heads = heads;
  p.padded_head_dim = 128;
  p.kv_bytes = 512;
  p.num_ctas = ctas;
  p.allow_split = number(5);
  block::run([&] { plan_kernel(p); });

  const PrefillTile& beyond = tiles[max_tiles];
  REQUIRE(beyond.sequence == 0 && beyond.block_end == 0);
  for (int i = 0; i < max_partials; ++i) REQUIRE(arrived[i] == 0 && combined[i] == 0);

  // A CTA without a ticket reads its start, too.
  for (int cta = header.work_tickets; cta < ctas; ++cta)
    REQUIRE(first[cta].head == 0 && first[cta].tile.row == 0 && first[cta].tile.query_len == 0);
  REQUIRE(first[ctas].head == -1);

  // What the loader adds to a place.
  auto shift = [&](int head) { return (head - (heads - header.split_heads)) * header.head_partials; };

  // Blocks of each (head, sequence, row), and where its pieces leave what they find.
  std::map<std::tuple<int, int, int>, std::set<int>> seen;
  std::map<std::tuple<int, int, int>, int> counters, found;
  std::set<int> slots;
  for (int ticket = 0; ticket < header.work_tickets; ++ticket) {
    int entry, head;
    split_ticket(ticket, header, heads, entry, head);
    REQUIRE(entry >= 0 && entry < max_tiles && head >= 0 && head < heads);
    const PrefillTile& tile = tiles[entry];
    const auto key = std::make_tuple(head, tile.sequence, tile.row);
    if (ticket < ctas) REQUIRE(first[ticket].head == head && first[ticket].tile.row == tile.row);
    if (ticket < ctas) REQUIRE(first[ticket].tile.block_end == tile.block_end);
    REQUIRE(seen.count(key) == 0 || tile.split >= 0);
    auto& blocks = seen[key];
    for (int b = tile.block_begin; b < tile.block_end; ++b) REQUIRE(blocks.insert(b).second);
    int pieces = 0;
    if (tile.split >= 0) {
      const SplitPlace place = SplitPlace::unpack(tile.split);
      pieces = place.pieces;
      REQUIRE(head >= heads - header.split_heads && pieces > 1);
      const int slot = place.slot + shift(head), counter = place.index + shift(head);
      REQUIRE(slot >= 0 && slot < max_partials && slots.insert(slot).second);
      REQUIRE(counter >= 0 && counter < max_partials);
      REQUIRE(found[key]++ == 0 || counters[key] == counter);
      counters[key] = counter;
    }
    std::printf("%d %d %d %d %d %d\n", head, tile.sequence, tile.row, tile.block_begin, tile.block_end, pieces);
  }

  // Each tile of each head once, with all blocks that its rows see.
  size_t expected = 0;
  for (int i = 0; i < batch; ++i) {
    const int queries = starts[i + 1] - starts[i], offset = keys[i] - queries;
    for (int row = 0; row < queries * group; row += kPrefillRows, expected += heads) {
      const int top = row / group, bottom = min((row + kPrefillRows - 1) / group, queries - 1);
      const int begin = p.window.begin(top + offset), end = p.window.end(bottom + offset, keys[i]);
      for (int head = 0; head < heads; ++head) {
        const auto& blocks = seen.at({head, i, row});
        const int from = end > begin ? begin / kPrefillKeys : 0;
        const int to = end > begin ? (end + kPrefillKeys - 1) / kPrefillKeys : 0;
        REQUIRE(static_cast<int>(blocks.size()) == to - from);
        if (to > from) REQUIRE(*blocks.begin() == from && *blocks.rbegin() == to - 1);
      }
    }
  }
  REQUIRE(seen.size() == expected);

  // Each split tile is merged once a slice of columns, from its first piece's slot on.
  const int merges = header.total_tickets - header.work_tickets;
  REQUIRE(merges == static_cast<int>(found.size()) * (p.padded_head_dim / kCombineDims));
  std::set<std::pair<int, int>> merged;
  for (int i = 0; i < header.num_splits * header.split_heads; ++i) {
    const int head = heads - header.split_heads + i % header.split_heads;
    const PrefillTile& tile = tiles[entries.at(i / header.split_heads)];
    const SplitPlace place = SplitPlace::unpack(tile.split);
    const auto key = std::make_tuple(head, tile.sequence, tile.row);
    REQUIRE(found.at(key) == place.pieces && counters.at(key) == place.index + shift(head));
    for (int piece = 0; piece < place.pieces; ++piece) REQUIRE(slots.erase(place.slot + shift(head) + piece) == 1);
  }
  REQUIRE(slots.empty());
}
