// Checks of the programs that run device code on the CPU.
#pragma once

#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition)                                                \
  if (!(condition)) {                                                     \
    std::fprintf(stderr, "line %d: " #condition "\n", __LINE__);          \
    std::abort();                                                         \
  }
