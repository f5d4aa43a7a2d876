// Which kernels run, and on how many threads.
#pragma once

#include <cstdint>

#include "host_ops.h"

namespace host_ops {

// Widest level that the processor and the operating system support, lowered by `limit` ("scalar", "avx2",
// "avx512", "neon" or "" for none). Returns nullptr if `limit` names no level that runs here.
const KernelTable* select_kernels(const char* limit);

// What a thread takes at a time, and the least that is worth a second thread. A multiple of a cache line.
constexpr int64_t kTaskNumel = 16384;

// threads = 0: as many as OpenMP would take. Threads take tasks of a fixed extent as they get free.
void run_adam(const KernelTable& kernels, const AdamArgs& args, int64_t numel, int threads);
void run_roof(const KernelTable& kernels, const AdamArgs& args, int64_t numel, int threads);

// Between a form and fp32; `numel` elements from a multiple of kBlockNumel on.
void run_join(const KernelTable& kernels, const AdamArgs& args, float* x, int64_t numel);
void run_split(const KernelTable& kernels, const AdamArgs& args, const float* x, int64_t numel);
void run_decode(const KernelTable& kernels, const uint8_t* codes, const float* scale, bool is_signed,
                float* x, int64_t numel);
void run_encode(const KernelTable& kernels, const float* x, bool is_signed, uint8_t* codes, float* scale,
                int64_t numel);

// Returns the sum of squares; its bits depend on the elements alone, not on level or threads.
double run_accumulate(const KernelTable& kernels, const AccumulateArgs& args, int64_t numel, int threads);

}  // namespace host_ops
