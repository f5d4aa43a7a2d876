// Every vector level of this processor against the scalar one, bit for bit, without torch or Python: for
// sanitizers and for emulators. Arrays end where their memory ends, so that a sanitizer sees one element too
// many.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../adam/adam_queue.h"
#include "../adam/dispatch.h"
#include "../adam/rollback.h"

namespace {

using host_ops::Dtype;
using host_ops::KernelTable;
using host_ops::Stream;

constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
constexpr int64_t kSizes[] = {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 65, 1025, 40007, 600011};
constexpr int64_t kAllTypesBelow = 2000;

int failures = 0;

size_t element_nbytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// One array of exact size, `offset` elements past its allocation's start.
class Array {
 public:
    Array(int64_t numel, Dtype dtype, int64_t offset, uint32_t seed)
        : dtype_(dtype),
          offset_nbytes_(offset * element_nbytes(dtype)),
          bytes_(offset_nbytes_ + numel * element_nbytes(dtype)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < numel; ++i) {
            // Every 13th element is any bit pattern at all: denormals, infinities, NaN.
            const uint32_t bits = random();
            const float x = std::fabs(normal(random)) + 0.01f;
            if (dtype == Dtype::kFloat32) {
                put(i, i % 13 == 12 ? bits : word(x));
            } else {
                const uint16_t half = dtype == Dtype::kBfloat16 ? word(x) >> 16 : 0x3c00 + (bits & 0x3ff);
                put(i, i % 13 == 12 ? static_cast<uint16_t>(bits) : half);
            }
        }
    }
    Stream stream() { return {bytes_.data() + offset_nbytes_, dtype_}; }
    // NaN becomes one and the same: which of two NaN an operation returns is left to the compiler.
    void unify_nan() {
        for (size_t at = offset_nbytes_; at < bytes_.size(); at += element_nbytes(dtype_)) {
            uint32_t bits = 0;
            std::memcpy(&bits, &bytes_[at], element_nbytes(dtype_));
            const uint32_t infinity = dtype_ == Dtype::kFloat32    ? 0x7f800000
                                      : dtype_ == Dtype::kBfloat16 ? 0x7f80
                                                                   : 0x7c00;
            const uint32_t sign = dtype_ == Dtype::kFloat32 ? 0x80000000 : 0x8000;
            if ((bits & ~sign) > infinity) {
                std::memset(&bytes_[at], 0xff, element_nbytes(dtype_));
            }
        }
    }
    bool operator==(const Array& other) const { return bytes_ == other.bytes_; }

 private:
    static uint32_t word(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits;
    }
    template <class T>
    void put(int64_t i, T value) {
        std::memcpy(bytes_.data() + offset_nbytes_ + i * sizeof value, &value, sizeof value);
    }
    Dtype dtype_;
    size_t offset_nbytes_;
    std::vector<unsigned char> bytes_;
};

struct Case {
    int64_t numel;
    Dtype master, grad, moment, out;
    int64_t offset;
    bool l2;
    int threads;
    bool queued;
};

struct Result {
    std::vector<Array> arrays;
    double sum_stored, sum_added, sum_read;

    bool operator==(const Result& other) const {
        return arrays == other.arrays && same(sum_stored, other.sum_stored) &&
               same(sum_added, other.sum_added) && same(sum_read, other.sum_read);
    }
    static bool same(double a, double b) {
        return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
    }
};

Stream after(Stream s, int64_t numel) {
    s.data = static_cast<char*>(s.data) + numel * element_nbytes(s.dtype);
    return s;
}

// The step in two runs that follow each other without a pause.
void queue_adam(const KernelTable& kernels, const host_ops::AdamArgs& args, int64_t numel, int threads) {
    host_ops::AdamQueue queue(kernels, threads);
    // A smaller form goes on at a block.
    const int64_t block = host_ops::kBlockNumel;
    const int64_t first = args.forms.any() ? numel / 3 / block * block : numel / 3;
    host_ops::AdamArgs rest = args;
    for (Stream* s : {&rest.master, &rest.grad, &rest.exp_avg, &rest.exp_avg_sq, &rest.out}) {
        *s = after(*s, first);
    }
    rest.forms.first += static_cast<uint32_t>(first);
    if (args.forms.ties != nullptr) {
        rest.forms.ties += first / host_ops::kTieBits;
    }
    if (args.forms.exp_avg_scale != nullptr) {
        rest.exp_avg.data = static_cast<char*>(args.exp_avg.data) + first;
        rest.exp_avg_sq.data = static_cast<char*>(args.exp_avg_sq.data) + first;
        rest.forms.exp_avg_scale += first / block;
        rest.forms.exp_avg_sq_scale += first / block;
    }
    const int64_t ticket = queue.submit(args, first);
    queue.submit(rest, numel - first);
    queue.wait(ticket);  // the other one is waited for by the destructor
}

host_ops::AdamArgs adam_constants() {
    host_ops::AdamArgs args{};
    args.one_minus_beta1 = 0.1f;
    args.beta2 = 0.999f;
    args.one_minus_beta2 = 0.001f;
    args.neg_step_size = -0.01f;
    args.bias_correction2_sqrt = 0.7f;
    args.eps = 1e-8f;
    return args;
}

Result run(const KernelTable& kernels, const Case& c) {
    Result r{{}, 0, 0, 0};
    const Dtype dtypes[] = {c.master, c.grad, c.moment, c.moment, c.out};
    uint32_t seed = 1;
    for (const Dtype dtype : dtypes) {
        r.arrays.emplace_back(c.numel, dtype, c.offset, seed++);
    }
    host_ops::AdamArgs args = adam_constants();
    args.master = r.arrays[0].stream();
    args.grad = r.arrays[1].stream();
    args.exp_avg = r.arrays[2].stream();
    args.exp_avg_sq = r.arrays[3].stream();
    args.out = r.arrays[4].stream();
    args.grad_scale = 0.5f;
    args.decay = c.l2 ? 1.0f : 0.999f;
    args.l2 = c.l2 ? 0.1f : 0.0f;
    if (c.queued) {
        queue_adam(kernels, args, c.numel, c.threads);
    } else {
        host_ops::run_adam(kernels, args, c.numel, c.threads);
    }
    using host_ops::AccumulateMode;
    const Stream dst = r.arrays[4].stream(), src = r.arrays[1].stream();
    r.sum_added = host_ops::run_accumulate(kernels, {dst, src, AccumulateMode::kAdd}, c.numel, c.threads);
    r.sum_read = host_ops::run_accumulate(kernels, {dst, dst, AccumulateMode::kReadOnly}, c.numel, c.threads);
    const Stream moment = r.arrays[2].stream();
    r.sum_stored =
        host_ops::run_accumulate(kernels, {moment, src, AccumulateMode::kStore}, c.numel, c.threads);
    for (Array& array : r.arrays) {
        array.unify_nan();
    }
    return r;
}

void compare(const KernelTable& scalar, const KernelTable& kernels, Case c, int threads, bool queued) {
    const Result expected = run(scalar, c);
    c.threads = threads;
    c.queued = queued;
    if (!(run(kernels, c) == expected)) {
        ++failures;
        std::printf("%s differs: numel %lld, types %d %d %d %d, offset %lld, l2 %d, threads %d, queued %d\n",
                    kernels.name, static_cast<long long>(c.numel), static_cast<int>(c.master),
                    static_cast<int>(c.grad), static_cast<int>(c.moment), static_cast<int>(c.out),
                    static_cast<long long>(c.offset), c.l2, threads, queued);
    }
}

// Steps in the smaller forms, from exact-size arrays again; `moments`: 0 fp32, 1 bf16 by chance, 2 bytes.
std::vector<std::vector<unsigned char>> run_forms(const KernelTable& kernels, int64_t numel, int moments,
                                                  int threads) {
    const int64_t blocks = (numel + host_ops::kBlockNumel - 1) / host_ops::kBlockNumel;
    const int64_t words = (numel + host_ops::kTieBits - 1) / host_ops::kTieBits;
    const int64_t moment_nbytes[] = {4, 2, 1};
    std::vector<std::vector<unsigned char>> arrays;
    for (const int64_t nbytes : {2 * numel, 2 * numel, moment_nbytes[moments] * numel,
                                 moment_nbytes[moments] * numel, 4 * blocks, 4 * blocks, 2 * words}) {
        arrays.emplace_back(nbytes, 0);
    }
    std::mt19937 random(7);
    std::vector<float> master(numel), grad(numel);
    for (int64_t i = 0; i < numel; ++i) {
        master[i] = static_cast<float>(random()) * 1e-9f - 2.0f;
        grad[i] = static_cast<float>(random()) * 1e-9f - 2.0f;
    }
    host_ops::AdamArgs args = adam_constants();
    args.master = {arrays[0].data(), Dtype::kBfloat16};
    args.out = {arrays[1].data(), Dtype::kBfloat16};
    const Dtype dtype = moments == 0 ? Dtype::kFloat32 : Dtype::kBfloat16;
    args.exp_avg = {arrays[2].data(), dtype};
    args.exp_avg_sq = {arrays[3].data(), dtype};
    args.grad = {grad.data(), Dtype::kFloat32};
    args.grad_scale = args.decay = 1.0f;
    args.forms.ties = reinterpret_cast<uint16_t*>(arrays[6].data());
    args.forms.stochastic = moments == 1;
    if (moments == 2) {
        args.forms.exp_avg_scale = reinterpret_cast<float*>(arrays[4].data());
        args.forms.exp_avg_sq_scale = reinterpret_cast<float*>(arrays[5].data());
    }
    host_ops::run_split(kernels, args, master.data(), numel);
    for (uint32_t step = 0; step < 3; ++step) {
        args.forms.noise_key = step;
        queue_adam(kernels, args, numel, threads);
    }
    return arrays;
}

void check_forms(const KernelTable& scalar, const KernelTable& kernels, int threads) {
    for (const int64_t numel : kSizes) {
        for (int moments = 0; moments < 3; ++moments) {
            if (run_forms(scalar, numel, moments, 1) != run_forms(kernels, numel, moments, threads)) {
                ++failures;
                std::printf("%s differs in small forms: numel %lld, moments %d\n", kernels.name,
                            static_cast<long long>(numel), moments);
            }
        }
    }
}

// Bounds and threads alone: what it computes is tested from Python.
void run_rollback() {
    for (const int64_t numel : kSizes) {
        for (const Dtype dtype : kDtypes) {
            Array arrays[] = {
                {numel, dtype, 1, 1}, {numel, dtype, 0, 2}, {numel, dtype, 3, 3}, {numel, dtype, 2, 4}};
            host_ops::AdamArgs args = adam_constants();
            args.master = arrays[0].stream();
            args.grad = arrays[1].stream();
            args.exp_avg = arrays[2].stream();
            args.exp_avg_sq = arrays[3].stream();
            args.grad_scale = args.decay = 1.0f;
            host_ops::run_rollback(args, false, numel);
        }
    }
}

void check_level(const KernelTable& scalar, const KernelTable& kernels, int threads) {
    for (const int64_t numel : kSizes) {
        for (int types = 0; types < 81; ++types) {
            const Case c{numel,
                         kDtypes[types % 3],
                         kDtypes[types / 3 % 3],
                         kDtypes[types / 9 % 3],
                         kDtypes[types / 27],
                         (numel + types) % 17,
                         types % 2 == 1,
                         1,
                         false};
            if (numel < kAllTypesBelow || types % 20 == 3) {
                compare(scalar, kernels, c, threads, false);
            }
            if (types % 20 == 3) {
                compare(scalar, kernels, c, threads, true);
            }
        }
    }
}

}  // namespace

// Argument: threads of the compared level (default 3; the scalar results come from one).
int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 3;
    const KernelTable* scalar = host_ops::select_kernels("scalar");
    run_rollback();
    for (const char* level : {"scalar", "avx2", "avx512", "neon"}) {
        const KernelTable* kernels = host_ops::select_kernels(level);
        if (kernels != nullptr) {
            check_level(*scalar, *kernels, threads);
            check_forms(*scalar, *kernels, threads);
            std::printf("%s: checked\n", level);
        }
    }
    std::printf("%d differences\n", failures);
    return failures == 0 ? 0 : 1;
}
