// The formulas, once, over a vector wrapper V. Included by one source file a vector level, after the pragma
// that switches the instruction set on; the unnamed namespace keeps the copies apart.
#pragma once

#include <cstdint>

#include "forms.h"
#include "host_ops.h"
#include "vec_scalar.h"

namespace {

using host_ops::AccumulateArgs;
using host_ops::AccumulateMode;
using host_ops::AdamArgs;
using host_ops::Dtype;
using host_ops::kSumLanes;
using host_ops::Stream;

// Elements between a load and the prefetch for its successor: 1 KiB of fp32, far enough for DRAM latency.
constexpr int64_t kPrefetchNumel = 256;

// The element type is looked up for each vector: the branch never changes within a call, so it is predicted,
// and one copy of the formula serves all type combinations where 108 would have to be compiled.
template <class V>
inline typename V::F load(const Stream& s, int64_t i) {
    switch (s.dtype) {
        case Dtype::kFloat32:
            return V::load(static_cast<const float*>(s.data) + i);
        case Dtype::kBfloat16:
            return V::widen_bf16(V::load(static_cast<const uint16_t*>(s.data) + i));
        default:
            return V::widen_fp16(V::load(static_cast<const uint16_t*>(s.data) + i));
    }
}

template <class V>
inline void store_words(const Stream& s, int64_t i, typename V::H x) {
    uint16_t* const p = static_cast<uint16_t*>(s.data) + i;
    s.nontemporal ? V::stream(p, x) : V::store(p, x);
}

// Returns what the array then holds: x, rounded if the array is of 16 bits.
template <class V>
inline typename V::F store(const Stream& s, int64_t i, typename V::F x) {
    if (s.dtype == Dtype::kFloat32) {
        float* const p = static_cast<float*>(s.data) + i;
        s.nontemporal ? V::stream(p, x) : V::store(p, x);
        return x;
    }
    if (s.dtype == Dtype::kBfloat16) {
        const typename V::H words = V::narrow_bf16(x);
        store_words<V>(s, i, words);
        return V::widen_bf16(words);
    }
    const typename V::H words = V::narrow_fp16(x);
    store_words<V>(s, i, words);
    return V::widen_fp16(words);
}

inline void prefetch(const Stream& s, int64_t i) {
    const int64_t element_nbytes = s.dtype == Dtype::kFloat32 ? 4 : 2;
    // As an integer: near the end the address lies past the array, which only a prefetch may touch.
    const uintptr_t address = reinterpret_cast<uintptr_t>(s.data);
    __builtin_prefetch(reinterpret_cast<const void*>(address + (i + kPrefetchNumel) * element_nbytes));
}

// What a step adds to the decayed parameters, of its new moments.
template <class V>
inline typename V::F adam_change(const AdamArgs& a, typename V::F m, typename V::F v) {
    const typename V::F denom = V::add(V::div(V::sqrt(v), V::set1(a.bias_correction2_sqrt)), V::set1(a.eps));
    return V::div(V::mul(m, V::set1(a.neg_step_size)), denom);
}

// Operations are ordered, and fused or not, as in torch.optim.Adam and AdamW without `fused`.
template <class V>
inline void adam_lanes(const AdamArgs& a, int64_t i) {
    using F = typename V::F;
    F p = load<V>(a.master, i);
    F g = V::mul(load<V>(a.grad, i), V::set1(a.grad_scale));
    F m = load<V>(a.exp_avg, i);
    F v = load<V>(a.exp_avg_sq, i);
    if (a.l2 != 0.0f) {
        g = V::fma(p, V::set1(a.l2), g);
    }
    p = V::mul(p, V::set1(a.decay));
    // torch.lerp: exact at either end.
    const F delta = V::sub(g, m);
    m = a.one_minus_beta1 < 0.5f ? V::fma(delta, V::set1(a.one_minus_beta1), m)
                                 : V::fma(delta, V::set1(a.one_minus_beta1 - 1.0f), g);
    v = V::fma(V::mul(g, V::set1(a.one_minus_beta2)), g, V::mul(v, V::set1(a.beta2)));
    p = V::add(p, adam_change<V>(a, m, v));
    store<V>(a.exp_avg, i, m);
    store<V>(a.exp_avg_sq, i, v);
    store<V>(a.master, i, p);
    if (a.out.data != nullptr) {
        store<V>(a.out, i, p);
    }
}

inline Stream from(Stream s, int64_t i) {
    s.data = static_cast<char*>(s.data) + i * (s.dtype == Dtype::kFloat32 ? 4 : 2);
    return s;
}

inline uint16_t* words(const Stream& s, int64_t i) { return static_cast<uint16_t*>(s.data) + i; }
inline uint8_t* codes(const Stream& s, int64_t i) { return static_cast<uint8_t*>(s.data) + i; }
inline Stream floats(float* x) { return {x, Dtype::kFloat32}; }

// What a block holds while it is computed; in the first cache.
struct Block {
    alignas(64) float master[kBlockNumel];
    alignas(64) float exp_avg[kBlockNumel];
    alignas(64) float exp_avg_sq[kBlockNumel];
};

constexpr Codec kFirstMoment{true};
constexpr Codec kSecondMoment{false};

// Widens what of elements [at, at + numel) is in a smaller form; returns the arguments of their step.
template <class V>
inline AdamArgs open_block(const AdamArgs& a, Block& block, int64_t at, int64_t numel) {
    AdamArgs local = a;
    local.grad = from(a.grad, at);
    local.out = a.out.data == nullptr ? a.out : from(a.out, at);
    if (a.forms.ties != nullptr) {
        join_master(words(a.out, at), words(a.master, at), a.forms.ties + at / kTieBits, block.master, numel);
        local.master = floats(block.master);
    } else {
        local.master = from(a.master, at);
    }
    local.exp_avg = floats(block.exp_avg);
    local.exp_avg_sq = floats(block.exp_avg_sq);
    if (a.forms.exp_avg_scale != nullptr) {
        const int64_t index = at / kBlockNumel;
        decode<V>(codes(a.exp_avg, at), kFirstMoment, a.forms.exp_avg_scale[index], block.exp_avg, numel);
        decode<V>(codes(a.exp_avg_sq, at), kSecondMoment, a.forms.exp_avg_sq_scale[index], block.exp_avg_sq,
                  numel);
    } else if (a.forms.stochastic) {
        widen_moment(words(a.exp_avg, at), block.exp_avg, numel);
        widen_moment(words(a.exp_avg_sq, at), block.exp_avg_sq, numel);
    } else {
        local.exp_avg = from(a.exp_avg, at);
        local.exp_avg_sq = from(a.exp_avg_sq, at);
    }
    return local;
}

// What a step in a smaller form reads of each element, for prefetching: a block is a burst of 48 cache lines,
// more than a core can have under way, so they are asked for one vector at a time.
struct Reads {
    struct Line {
        uintptr_t address;
        int64_t nbytes;
    };
    Line lines[5];

    explicit Reads(const AdamArgs& a) {
        const int64_t moment_nbytes = a.forms.exp_avg_scale != nullptr ? 1 : a.forms.stochastic ? 2 : 4;
        const bool split = a.forms.ties != nullptr;
        lines[0] = {reinterpret_cast<uintptr_t>(a.master.data), split ? 2 : 4};
        lines[1] = {reinterpret_cast<uintptr_t>(a.exp_avg.data), moment_nbytes};
        lines[2] = {reinterpret_cast<uintptr_t>(a.exp_avg_sq.data), moment_nbytes};
        lines[3] = {reinterpret_cast<uintptr_t>(a.grad.data), a.grad.dtype == Dtype::kFloat32 ? 4 : 2};
        lines[4] = split ? Line{reinterpret_cast<uintptr_t>(a.out.data), 2} : lines[0];
    }
    void prefetch(int64_t i) const {
        for (const Line& line : lines) {
            __builtin_prefetch(
                reinterpret_cast<const void*>(line.address + (i + kPrefetchNumel) * line.nbytes));
        }
    }
};

// Brings them back into their form.
template <class V>
inline void close_block(const AdamArgs& a, const Block& block, int64_t at, int64_t numel) {
    if (a.forms.ties != nullptr) {
        split_master(block.master, words(a.master, at), a.forms.ties + at / kTieBits, numel);
    }
    if (a.forms.exp_avg_scale != nullptr) {
        const int64_t index = at / kBlockNumel;
        a.forms.exp_avg_scale[index] = encode<V>(block.exp_avg, kFirstMoment, codes(a.exp_avg, at), numel);
        a.forms.exp_avg_sq_scale[index] =
            encode<V>(block.exp_avg_sq, kSecondMoment, codes(a.exp_avg_sq, at), numel);
    } else if (a.forms.stochastic) {
        round_moments(block.exp_avg, block.exp_avg_sq, words(a.exp_avg, at), words(a.exp_avg_sq, at), numel,
                      a.forms.first + static_cast<uint32_t>(at), a.forms.noise_key);
    }
}

template <class V>
void adam_blocks(const AdamArgs& a, int64_t begin, int64_t end) {
    const Reads reads(a);
    Block block;
    for (int64_t at = begin; at < end; at += kBlockNumel) {
        const int64_t numel = end - at < kBlockNumel ? end - at : kBlockNumel;
        const AdamArgs local = open_block<V>(a, block, at, numel);
        int64_t i = 0;
        for (; i + V::kLanes <= numel; i += V::kLanes) {
            reads.prefetch(at + i);
            adam_lanes<V>(local, i);
        }
        for (; i < numel; ++i) {
            adam_lanes<Scalar>(local, i);
        }
        close_block<V>(a, block, at, numel);
    }
    V::fence();
}

template <class V>
void adam(const AdamArgs& args, int64_t begin, int64_t end) {
    const AdamArgs a = args;  // a copy that no store can alias
    if (a.forms.any()) {
        adam_blocks<V>(a, begin, end);
        return;
    }
    int64_t i = begin;
    for (; i + V::kLanes <= end; i += V::kLanes) {
        prefetch(a.master, i);
        prefetch(a.grad, i);
        prefetch(a.exp_avg, i);
        prefetch(a.exp_avg_sq, i);
        adam_lanes<V>(a, i);
    }
    for (; i < end; ++i) {
        adam_lanes<Scalar>(a, i);
    }
    V::fence();
}

// The memory traffic of `adam`, with one addition a stream so that no compiler drops a load or a store: the
// roof of the benchmark.
template <class V>
void roof(const AdamArgs& args, int64_t begin, int64_t end) {
    const AdamArgs a = args;
    for (int64_t i = begin; i + V::kLanes <= end; i += V::kLanes) {
        prefetch(a.master, i);
        prefetch(a.grad, i);
        prefetch(a.exp_avg, i);
        prefetch(a.exp_avg_sq, i);
        const typename V::F g = load<V>(a.grad, i);
        const typename V::F p = V::add(load<V>(a.master, i), g);
        store<V>(a.master, i, p);
        store<V>(a.exp_avg, i, V::add(load<V>(a.exp_avg, i), g));
        store<V>(a.exp_avg_sq, i, V::add(load<V>(a.exp_avg_sq, i), g));
        if (a.out.data != nullptr) {
            store<V>(a.out, i, p);
        }
    }
    V::fence();
}

template <class V>
inline typename V::F accumulate_lanes(const AccumulateArgs& a, int64_t i) {
    if (a.mode == AccumulateMode::kReadOnly) {
        return load<V>(a.dst, i);
    }
    typename V::F x = load<V>(a.src, i);
    if (a.mode == AccumulateMode::kAdd) {
        x = V::add(load<V>(a.dst, i), x);
    }
    return store<V>(a.dst, i, x);
}

template <class V>
double accumulate(const AccumulateArgs& args, int64_t begin, int64_t end) {
    constexpr int64_t kVectors = kSumLanes / V::kLanes;
    const AccumulateArgs a = args;
    typename V::D sums[kVectors];
    for (auto& sum : sums) {
        sum = V::zero_d();
    }
    int64_t i = begin;
    for (; i + kSumLanes <= end; i += kSumLanes) {
        prefetch(a.src, i);
        if (!a.dst.nontemporal) {  // else it is not read, and must not be
            prefetch(a.dst, i);
        }
        for (int64_t k = 0; k < kVectors; ++k) {
            sums[k] = V::add_square(sums[k], accumulate_lanes<V>(a, i + k * V::kLanes));
        }
    }
    V::fence();
    double lanes[kSumLanes];
    for (int64_t k = 0; k < kVectors; ++k) {
        V::store_d(lanes + k * V::kLanes, sums[k]);
    }
    for (int64_t k = 0; i < end; ++i, ++k) {
        lanes[k] = Scalar::add_square(lanes[k], accumulate_lanes<Scalar>(a, i));
    }
    for (int64_t width = kSumLanes / 2; width > 0; width /= 2) {
        for (int64_t k = 0; k < width; ++k) {
            lanes[k] += lanes[k + width];
        }
    }
    return lanes[0];
}

inline void join(const AdamArgs& a, float* x, int64_t begin, int64_t end) {
    join_master(words(a.out, begin), words(a.master, begin), a.forms.ties + begin / kTieBits, x + begin,
                end - begin);
}

template <class V>
void split(const AdamArgs& a, const float* x, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        store<Scalar>(a.out, i, x[i]);
    }
    split_master(x + begin, words(a.master, begin), a.forms.ties + begin / kTieBits, end - begin);
}

template <class V>
void decode_blocks(const uint8_t* codes, const float* scale, bool is_signed, float* x, int64_t begin,
                   int64_t end) {
    for (int64_t at = begin; at < end; at += kBlockNumel) {
        const int64_t numel = end - at < kBlockNumel ? end - at : kBlockNumel;
        decode<V>(codes + at, Codec{is_signed}, scale[at / kBlockNumel], x + at, numel);
    }
}

template <class V>
void encode_blocks(const float* x, bool is_signed, uint8_t* codes, float* scale, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlockNumel) {
        const int64_t numel = end - at < kBlockNumel ? end - at : kBlockNumel;
        scale[at / kBlockNumel] = encode<V>(x + at, Codec{is_signed}, codes + at, numel);
    }
}

template <class V>
constexpr host_ops::KernelTable make_table(const char* name) {
    return {name, adam<V>, accumulate<V>, roof<V>, join, split<V>, decode_blocks<V>, encode_blocks<V>};
}

}  // namespace
