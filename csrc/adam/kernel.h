// The formulas, once, over a vector wrapper V. Included by one source file a vector level, after the pragma
// that switches the instruction set on; the unnamed namespace keeps the copies apart.
#pragma once

#include <cstdint>

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
    const F denom = V::add(V::div(V::sqrt(v), V::set1(a.bias_correction2_sqrt)), V::set1(a.eps));
    p = V::add(p, V::div(V::mul(m, V::set1(a.neg_step_size)), denom));
    store<V>(a.exp_avg, i, m);
    store<V>(a.exp_avg_sq, i, v);
    store<V>(a.master, i, p);
    if (a.out.data != nullptr) {
        store<V>(a.out, i, p);
    }
}

template <class V>
void adam(const AdamArgs& args, int64_t begin, int64_t end) {
    const AdamArgs a = args;  // a copy that no store can alias
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

template <class V>
constexpr host_ops::KernelTable make_table(const char* name) {
    return {name, adam<V>, accumulate<V>, roof<V>};
}

}  // namespace
