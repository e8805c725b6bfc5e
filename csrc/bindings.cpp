// The operators exported through TVM-FFI. Shapes, dtypes and meanings: each operator's api.h.
#include "common/info.h"
#include "compact_tokens/api.h"
#include "copy_pages/api.h"
#include "decode_attention/api.h"
#include "gather/api.h"
#include "prefill_attention/api.h"
#include "sparse_select/api.h"
#include "store_kv/api.h"
#include "transfer_pages/api.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(built_archs, bicl::built_archs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout_offsets, bicl::layout_offsets);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_kernel_compiler, bicl::set_kernel_compiler);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(choose_tiles, bicl::choose_tiles_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_tokens, bicl::compact_tokens_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pages, bicl::copy_pages_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_attention, bicl::decode_attention_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_workspace_bytes, bicl::decode_workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, bicl::gather_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_pages, bicl::index_pages_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_prefill, bicl::plan_prefill_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill_attention, bicl::prefill_attention_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill_workspace_bytes, bicl::prefill_workspace_bytes_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_tiles, bicl::score_tiles_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_tiles, bicl::select_tiles_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_kv, bicl::store_kv_api);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transfer_pages, bicl::transfer_pages_api);
