#pragma once

#include "../mla_decode/api.h"
#include "launch.h"

namespace bicl {

// latent [T, 576] of the pages' dtype, rows 16-byte aligned; slots int64 [T], negative: skip; pages as in mla_decode.
inline void store_latent_api(TensorView latent, TensorView pages, TensorView slots) {
  check_latent_pages(pages);
  const int device = pages.device().device_id;
  check_cuda(latent, "latent", device);
  check_shape(latent, "latent", {-1, kLatentDim});
  check_rows(latent, "latent");
  BICL_CHECK(dtype_of(latent, "latent") == dtype_of(pages, "pages")) << "latent must have the pages' dtype";
  check_aligned_rows(latent, "latent", 8);
  check_cuda(slots, "slots", device);
  check_shape(slots, "slots", {latent.size(0)});
  check_int(slots, "slots", 64);
  check_contiguous(slots, "slots");
  StoreLatentParams p;
  p.pages = pages.data_ptr();
  p.latent = latent.data_ptr();
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.token_stride = latent.stride(0);
  p.num_tokens = static_cast<int>(latent.size(0));
  DeviceGuard guard(device);
  store_latent(p, current_stream(device));
}

}  // namespace bicl
