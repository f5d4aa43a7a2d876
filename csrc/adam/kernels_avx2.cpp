// Level "avx2", compiled for its own instruction set whatever the compiler's flags say.
#include "host_ops.h"

#if defined(__x86_64__)

// Shared headers come before the pragma: an inline function of theirs, compiled here, may serve the whole
// program.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernel.h"
#include "vec_avx2.h"

namespace {

constexpr host_ops::KernelTable kTable = make_table<Avx2>("avx2");

}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#endif

const host_ops::KernelTable* host_ops::avx2_kernels() { return &kTable; }

#else

const host_ops::KernelTable* host_ops::avx2_kernels() { return nullptr; }

#endif
