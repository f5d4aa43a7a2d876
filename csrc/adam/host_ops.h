// Interface between the Python binding and the vector kernels; free of torch, so kernels compile in a second.
#pragma once

#include <cstdint>

namespace host_ops {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// One flat array. Kernels address it by element and accept any alignment of the element type.
struct Stream {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    bool nontemporal =
        false;  // stores go past the cache; only for an array that is not read, aligned to 64 bytes
};

// Elements that share a scale, and that are converted at once. Runs of a step in a smaller form start at a
// multiple of it.
constexpr int64_t kBlockNumel = 256;
// Elements that share a word of `ties`.
constexpr int64_t kTieBits = 16;

// What is not kept in fp32. All that is null or false is.
struct Forms {
    // The master is the rest of 16 bits that `out`, which holds the weights, does not; see forms.h.
    uint16_t* ties;  // one bit an element
    // The moments are bytes with one scale a block.
    float* exp_avg_scale;
    float* exp_avg_sq_scale;
    // The moments are bf16, rounded by chance: noise from the key and the number of the element.
    bool stochastic;
    uint32_t noise_key;
    uint32_t first;  // number of the run's first element

    bool any() const { return ties != nullptr || exp_avg_scale != nullptr || stochastic; }
};

// One Adam step over flat arrays. Constants are rounded once from doubles by the caller.
struct AdamArgs {
    Stream master;
    Stream grad;
    Stream exp_avg;
    Stream exp_avg_sq;
    Stream out;        // data == nullptr: no output
    float grad_scale;  // gradient is multiplied by this first
    float decay;       // decoupled decay: 1 - lr * weight_decay; else 1
    float l2;          // L2 decay added to the gradient; else 0
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float neg_step_size;  // -lr / bias_correction1
    float bias_correction2_sqrt;
    float eps;
    Forms forms;
};

enum class AccumulateMode { kStore, kAdd, kReadOnly };

// dst = src, dst += src, or dst only read; each also sums the squares of what dst then holds.
struct AccumulateArgs {
    Stream dst;
    Stream src;
    AccumulateMode mode;
};

// Sums are taken in chunks of a multiple of this many elements, each element going to the double accumulator
// (index % kSumLanes): the partition is the same at every vector width, so are the bits of the sum.
constexpr int64_t kSumLanes = 16;

// The kernels of one vector level. Ranges are [begin, end) in elements.
struct KernelTable {
    const char* name;
    void (*adam)(const AdamArgs& args, int64_t begin, int64_t end);
    double (*accumulate)(const AccumulateArgs& args, int64_t begin, int64_t end);
    void (*roof)(const AdamArgs& args, int64_t begin, int64_t end);
    // Between forms and fp32, without a step: `args.master`, `args.out` and `args.forms` as in `adam`, and
    // `x`, of which [begin, end) is read or written.
    void (*join)(const AdamArgs& args, float* x, int64_t begin, int64_t end);
    void (*split)(const AdamArgs& args, const float* x, int64_t begin, int64_t end);
    void (*decode)(const uint8_t* codes, const float* scale, bool is_signed, float* x, int64_t begin,
                   int64_t end);
    void (*encode)(const float* x, bool is_signed, uint8_t* codes, float* scale, int64_t begin, int64_t end);
};

// Each returns nullptr where the compiler's target architecture has no such level.
const KernelTable* scalar_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* neon_kernels();

}  // namespace host_ops
