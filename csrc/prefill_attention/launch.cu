#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "launch.h"
#include "registry.h"

namespace bicl {
namespace prefill {
namespace {

using Entry = std::pair<Variant, Launcher>;

std::vector<Entry>& registry() {
  static std::vector<Entry> entries;  // filled before main, by static initialisers in any order
  return entries;
}

const char* name_of(Family family) { return family == Family::kSm90 ? "sm_90a" : "mma"; }

Launcher find(const Variant& wanted) {
  for (const auto& [v, launcher] : registry())
    if (v.family == wanted.family && v.query == wanted.query && v.stored == wanted.stored &&
        v.padded_head_dim == wanted.padded_head_dim && v.tile == wanted.tile)
      return launcher;
  std::string dims;
  for (const auto& [v, launcher] : registry())
    if (v.family == wanted.family && v.query == wanted.query && v.stored == wanted.stored && v.tile == wanted.tile)
      dims += (dims.empty() ? "" : ", ") + std::to_string(v.padded_head_dim);
  throw std::runtime_error("prefill_attention: no " + std::string(name_of(wanted.family)) +
                           " kernel for padded head_dim " + std::to_string(wanted.padded_head_dim) +
                           " and these dtypes is compiled in; compiled head_dims: " + (dims.empty() ? "none" : dims));
}

}  // namespace

void register_launcher(const Variant& variant, Launcher launcher) { registry().emplace_back(variant, launcher); }

}  // namespace prefill

bool prefill_uses_sm90(const Pages& pages, const DeviceInfo& device) {
  const int d = pages.padded_head_dim;
  if (device.major != 9 || pages.page_size != pages.tile) return false;
  if (is_fp8(pages.dtype))
    return pages.dtype == DType::kFloat8E4M3 && pages.tile == 64 && (d == 64 || d == 128);
  return d == 64 || d == 128 || d == 192 || d == 256 || (pages.tile == 32 && (d == 96 || d == 160));
}

void prefill_attention(const PrefillParams& p, bool force_sm80, int device, cudaStream_t stream) {
  const DeviceInfo& info = device_info(device);
  const bool sm90 = !force_sm80 && prefill_uses_sm90(p.pages, info);
  const auto family = sm90 ? prefill::Family::kSm90 : prefill::Family::kMma;
  const int tile = sm90 ? p.pages.tile : 0;
  prefill::find({family, p.query_dtype, p.pages.dtype, p.pages.padded_head_dim, tile})(p, info.num_sms, stream);
}

}  // namespace bicl
