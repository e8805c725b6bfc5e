// What a producer must know to copy one block into a stage.
#pragma once

#include "../common/layout.cuh"

namespace bicl::decode {

struct alignas(16) BlockSource {
  int page[2];  // page ids; the second only with pages of 32 tokens
  int head;     // KV head
  int16_t rows; // valid keys of the block, 0 for a filler; other rows are not copied
  bool newest;  // holds the sequence's newest token
};
static_assert(sizeof(BlockSource) == 16);  // one load a lane

__device__ __forceinline__ const char* head_page(const Pages& pages, int page, int head) {
  return static_cast<const char*>(pages.data) + head_page_offset(pages, page, head);
}

}  // namespace bicl::decode
