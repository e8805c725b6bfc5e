#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// The index of every page that `slots` complete.
void index_pages(const IndexPagesParams& params, cudaStream_t stream);

// A decode step's store of one token a sequence, and the index of pages that this completes. Keys and values
// have 16 bits. choice_follows: the next kernel is choose_tiles(), which may start before the kernel ahead has ended.
void store_and_index(const StoreKvParams& params, const PageIndex& index, bool choice_follows, cudaStream_t stream);

// The same behind a rotation of query and key, all of the pages' own 16-bit dtype. Whole query heads a KV head.
void rotate_store_and_index(const RotateAndStoreParams& params, const PageIndex& index, bool choice_follows,
                            cudaStream_t stream);

// One score a page and query head.
void score_tiles(const TilesParams& params, int device, cudaStream_t stream);

// The pages to read, from scores.
void select_tiles(const TilesParams& params, int device, cudaStream_t stream);

// The same without scores in between: one launch where the card has clusters.
void choose_tiles(const TilesParams& params, int device, cudaStream_t stream);

}  // namespace bicl
