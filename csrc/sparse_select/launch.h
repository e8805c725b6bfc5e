#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Index rows of every page that `slots` complete.
void index_pages(const IndexPagesParams& params, cudaStream_t stream);

// One score a page and KV head; infinity for pages that are always kept.
void score_tiles(const TilesParams& params, int device, cudaStream_t stream);

// The pages to read, from scores.
void select_tiles(const TilesParams& params, int device, cudaStream_t stream);

// The same without scores in between: one launch where the card has clusters.
void choose_tiles(const TilesParams& params, int device, cudaStream_t stream);

}  // namespace bicl
