// Host side of a kernel launch: errors, attributes, the current device.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernel_source.h"

namespace bicl {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

#define BICL_CUDA_CHECK(call) ::bicl::cuda_check((call), #call)

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;
  int cluster = 1;   // CTAs a cluster along x
  bool pdl = false;  // programmatic dependent launch
  cudaStream_t stream = nullptr;
};

// Launches a kernel by its stub or handle and reports what the launch itself refuses. `args` must have the
// kernel's own parameter types.
template <typename... Args>
void launch_function(const void* function, const LaunchConfig& config, Args... args) {
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (config.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = config.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (config.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = config.grid;
  launch_config.blockDim = config.block;
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = config.stream;
  launch_config.attrs = attributes;
  launch_config.numAttrs = count;
  void* pointers[] = {&args...};
  BICL_CUDA_CHECK(cudaLaunchKernelExC(&launch_config, function, pointers));
}

template <typename... Params, typename... Args>
void launch_as(void (*)(Params...), const void* function, const LaunchConfig& config, Args&&... args) {
  launch_function<Params...>(function, config, std::forward<Args>(args)...);
}

// launch<kernel<T>>(config, args...)
template <auto kKernel, typename... Args>
void launch(const LaunchConfig& config, Args&&... args) {
  launch_as(kKernel, runnable(kernel_ref<kKernel>()), config, std::forward<Args>(args)...);
}

// Raises a kernel's limit of dynamic shared memory; cheap beside a launch, and right on every device.
template <auto kKernel>
void allow_shared_bytes(int bytes) {
  BICL_CUDA_CHECK(cudaFuncSetAttribute(runnable(kernel_ref<kKernel>()),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// What kernels and their launchers ask about a card; read once a device.
struct DeviceInfo {
  int major, minor;
  int num_sms;
  int max_shared_bytes;  // opt-in limit of one block
};

inline const DeviceInfo& device_info(int device) {
  constexpr int kMaxDevices = 64;
  static DeviceInfo cache[kMaxDevices];
  static bool known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("device index out of range");
  if (!known[device]) {
    DeviceInfo info;
    BICL_CUDA_CHECK(cudaDeviceGetAttribute(&info.major, cudaDevAttrComputeCapabilityMajor, device));
    BICL_CUDA_CHECK(cudaDeviceGetAttribute(&info.minor, cudaDevAttrComputeCapabilityMinor, device));
    BICL_CUDA_CHECK(cudaDeviceGetAttribute(&info.num_sms, cudaDevAttrMultiProcessorCount, device));
    BICL_CUDA_CHECK(cudaDeviceGetAttribute(&info.max_shared_bytes,
                                           cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    cache[device] = info;
    known[device] = true;
  }
  return cache[device];
}

// Makes `device` current for the scope; free when it already is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    BICL_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device) {
      BICL_CUDA_CHECK(cudaSetDevice(device));
      switched_ = true;
    }
  }
  ~DeviceGuard() {
    if (switched_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

}  // namespace bicl
