// Where a launch takes its kernel from: what was compiled in, or, on a card that this build has no code for,
// what NVRTC makes of the same sources (see bicl/ops/cuda/nvrtc.py).
#pragma once

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>

namespace bicl {

template <auto kKernel>
struct KernelTag {};

// A kernel template's instance: the host stub and a mangled type name that spells it out in full.
struct KernelRef {
  const void* stub;
  const char* tag;

  std::string spelled() const {
    const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(tag, nullptr, nullptr, nullptr), std::free);
    return text ? text.get() : tag;
  }
};

template <auto kKernel>
KernelRef kernel_ref() {
  return {reinterpret_cast<const void*>(kKernel), typeid(KernelTag<kKernel>).name()};
}

// A compiled image and the kernel's name in it.
struct KernelImage {
  std::string name;
  std::string image;
};

using KernelCompiler = std::function<KernelImage(const std::string& tag)>;

// Null unless the card lacks code. Set once, before the first launch, and never freed: what it calls is Python's,
// which is gone when this library's destructors run.
inline const KernelCompiler* kernel_compiler = nullptr;

// What to hand to the runtime in place of a host stub. Loads the kernel where it was not needed before.
inline const void* runnable(const KernelRef& kernel) {
  if (!kernel_compiler) return kernel.stub;
  static std::mutex mutex;
  static std::unordered_map<const void*, cudaKernel_t> loaded;  // for the life of the process
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = loaded.find(kernel.stub); found != loaded.end()) return found->second;
  const KernelImage made = (*kernel_compiler)(kernel.spelled());
  const auto check = [&](cudaError_t status) {
    if (status != cudaSuccess)
      throw std::runtime_error("cannot load " + made.name + ": " + cudaGetErrorString(status));
  };
  cudaLibrary_t library;
  cudaKernel_t function;
  check(cudaLibraryLoadData(&library, made.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  check(cudaLibraryGetKernel(&function, library, made.name.c_str()));
  return loaded[kernel.stub] = function;
}

}  // namespace bicl
