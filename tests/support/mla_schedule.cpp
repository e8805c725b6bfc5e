// Divides batches as mla_decode's teams of CTAs do, and checks that the pieces add up.
//
// Arguments: teams, then the lengths. Prints each team's first tile and that of the next one.
#include "warp.h"
#include "require.h"

#include "share.cuh"

using namespace bicl::mla;

int main(int count, char** arguments) {
  const int most = std::atoi(arguments[1]), batch = count - 2;
  std::vector<int32_t> lengths(batch);
  for (int b = 0; b < batch; ++b) lengths[b] = std::atoi(arguments[2 + b]);
  std::vector<int> memory(batch + 1, -1);
  const Entries entries(memory.data(), batch);
  warp::run([&](int lane) { entries.build(lengths.data(), lane); });

  int tile = 0;
  for (int b = 0; b < batch; ++b) {
    REQUIRE(entries.first_tile(b) == tile && entries.empty(b) == (lengths[b] == 0));
    for (int key = 0; key < lengths[b]; key += kTileKeys, ++tile) {
      REQUIRE(entries.sequence_of(tile) == b);
      REQUIRE(entries.keys(b, tile) == std::min(lengths[b] - key, kTileKeys));
    }
    if (lengths[b] > 0 && tile < entries.total()) REQUIRE(entries.next(b) == entries.sequence_of(tile));
  }
  REQUIRE(entries.total() == tile);

  const Teams teams(most, tile);
  REQUIRE(teams.begin(0) == 0 && teams.begin(most) == tile);
  for (int team = 0; team < most; ++team) {
    const int begin = teams.begin(team), end = teams.begin(team + 1);
    REQUIRE(begin <= end && (begin < end || begin == tile));
    for (int x = begin; x < end; ++x) REQUIRE(teams.owner(x) == team);
    std::printf("%d %d\n", begin, end);
  }
  // All teams between the first and the last of a sequence have a part of it: each is waited for.
  for (int b = 0; b < batch; ++b) {
    if (entries.empty(b)) continue;
    const int first = entries.first_tile(b), last = entries.first_tile(b + 1);
    for (int team = teams.owner(first); team <= teams.owner(last - 1); ++team)
      REQUIRE(std::max(teams.begin(team), first) < std::min(teams.begin(team + 1), last));
  }
}
