// The operators exported through TVM-FFI. Shapes, dtypes and meanings: each operator's api.h.
#include "common/info.h"
#include "store_kv/api.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout_offsets, bicl::layout_offsets);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_kv, bicl::store_kv_api);
