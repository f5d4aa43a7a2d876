#include "dispatch.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "flush_denormals.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace host_ops {
namespace {

// An array that is only written is written past the cache if it is larger than a core's cache holds: the
// processor then need not read what it overwrites, 2 of the 30 bytes of a step and 4 of the 10 of a first
// accumulation.
constexpr int64_t kNontemporalNumel = int64_t{1} << 19;
constexpr uintptr_t kNontemporalAlign = 64;
// Sums have at most this many partial results, kept on the stack: a call allocates nothing.
constexpr int64_t kMaxChunks = 1024;
constexpr int64_t kMinChunkNumel = 4096;
static_assert(kMinChunkNumel % kSumLanes == 0, "a chunk starts at accumulator 0");

bool supported(const KernelTable* kernels) {
    if (kernels == nullptr) {
        return false;
    }
#if defined(__x86_64__)
    // The builtin also asks the operating system whether it saves the wide registers. F16C is not among the
    // names that older compilers know.
    if (std::strncmp(kernels->name, "avx", 3) == 0) {
        unsigned int a = 0, b = 0, c = 0, d = 0;
        const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
        if (std::strcmp(kernels->name, "avx2") == 0) {
            return avx2;
        }
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return true;
}

int thread_count(int64_t numel, int threads) {
    const int64_t wanted = threads > 0 ? threads : omp_get_max_threads();
    return static_cast<int>(std::max<int64_t>(1, std::min(wanted, numel / kTaskNumel)));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Stream write_only(Stream s, int64_t numel) {
    s.nontemporal =
        numel >= kNontemporalNumel && reinterpret_cast<uintptr_t>(s.data) % kNontemporalAlign == 0;
    return s;
}

// Threads take the next task as they get free. With one range a thread, the slowest thread, of a machine that
// also runs copies and a training loop, made all others wait at the end of each tile: 0.236 against 0.194 ns
// a parameter on 16 cores (benchmarks/README.md). OpenMP with num_threads, not at::parallel_for: the number
// of threads is an argument of the call there, and here torch's own setting is left alone. It is one runtime
// and one pool all the same: torch loads its libgomp globally, so this library's calls bind to it whichever
// libgomp the linker named.
template <class Body>
void parallel_tasks(int64_t numel, int64_t task_numel, int threads, const Body& body) {
    const int64_t tasks = ceil_div(numel, task_numel);
#pragma omp parallel num_threads(threads)
    {
        const FlushDenormals flush;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            body(task * task_numel, std::min((task + 1) * task_numel, numel));
        }
    }
}

}  // namespace

const KernelTable* select_kernels(const char* limit) {
    const KernelTable* levels[] = {avx512_kernels(), avx2_kernels(), neon_kernels(), scalar_kernels()};
    for (const KernelTable* kernels : levels) {
        if (supported(kernels) && (*limit == '\0' || std::strcmp(limit, kernels->name) == 0)) {
            return kernels;
        }
    }
    return nullptr;
}

void run_adam(const KernelTable& kernels, const AdamArgs& args, int64_t numel, int threads) {
    AdamArgs a = args;
    if (a.forms.ties == nullptr) {  // else it is read
        a.out = write_only(a.out, numel);
    }
    parallel_tasks(numel, kTaskNumel, thread_count(numel, threads),
                   [&](int64_t begin, int64_t end) { kernels.adam(a, begin, end); });
}

void run_roof(const KernelTable& kernels, const AdamArgs& args, int64_t numel, int threads) {
    AdamArgs a = args;
    a.out = write_only(a.out, numel);
    parallel_tasks(numel, kTaskNumel, thread_count(numel, threads),
                   [&](int64_t begin, int64_t end) { kernels.roof(a, begin, end); });
}

void run_join(const KernelTable& kernels, const AdamArgs& args, float* x, int64_t numel) {
    parallel_tasks(numel, kTaskNumel, thread_count(numel, 0),
                   [&](int64_t begin, int64_t end) { kernels.join(args, x, begin, end); });
}

void run_split(const KernelTable& kernels, const AdamArgs& args, const float* x, int64_t numel) {
    parallel_tasks(numel, kTaskNumel, thread_count(numel, 0),
                   [&](int64_t begin, int64_t end) { kernels.split(args, x, begin, end); });
}

void run_decode(const KernelTable& kernels, const uint8_t* codes, const float* scale, bool is_signed,
                float* x, int64_t numel) {
    parallel_tasks(numel, kTaskNumel, thread_count(numel, 0), [&](int64_t begin, int64_t end) {
        kernels.decode(codes, scale, is_signed, x, begin, end);
    });
}

void run_encode(const KernelTable& kernels, const float* x, bool is_signed, uint8_t* codes, float* scale,
                int64_t numel) {
    parallel_tasks(numel, kTaskNumel, thread_count(numel, 0), [&](int64_t begin, int64_t end) {
        kernels.encode(x, is_signed, codes, scale, begin, end);
    });
}

double run_accumulate(const KernelTable& kernels, const AccumulateArgs& args, int64_t numel, int threads) {
    // Chunks follow from numel alone, and are added up in order: threads only choose who computes which.
    const int64_t chunk_numel =
        ceil_div(std::max(ceil_div(numel, kMaxChunks), kMinChunkNumel), kSumLanes) * kSumLanes;
    AccumulateArgs a = args;
    // In place (dst is src) the array is read after all.
    if (a.mode == AccumulateMode::kStore && a.dst.data != a.src.data) {
        a.dst = write_only(a.dst, numel);
    }
    double partial[kMaxChunks];
    const int64_t task_numel = ceil_div(kTaskNumel, chunk_numel) * chunk_numel;
    parallel_tasks(numel, task_numel, thread_count(numel, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += chunk_numel) {
            partial[i / chunk_numel] = kernels.accumulate(a, i, std::min(i + chunk_numel, end));
        }
    });
    double sum = 0.0;
    for (int64_t i = 0; i < ceil_div(numel, chunk_numel); ++i) {
        sum += partial[i];
    }
    return sum;
}

}  // namespace host_ops
