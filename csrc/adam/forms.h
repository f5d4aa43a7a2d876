// Smaller forms of master and moments, a block at a time, between their memory and arrays of floats.
// Plain loops that the compiler turns into vectors of the level that includes them; integers, and floats
// without contraction, so every level computes the same bits. In an unnamed namespace like the kernels.
#pragma once

#include <cstdint>

#include "host_ops.h"
#include "vec_scalar.h"

namespace {

using host_ops::kBlockNumel;
using host_ops::kTieBits;

// A master in two halves: its weight, rounded to nearest even, and what that rounding took away, as a signed
// number of 16 bits. One case does not fit: a master halfway between two weights, rounded down, differs by
// +0x8000. Its bit in `ties` says so.
inline void join_master(const uint16_t* __restrict weight, const uint16_t* __restrict rest,
                        const uint16_t* __restrict ties, float* __restrict master, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t signed_rest = static_cast<uint32_t>(static_cast<int16_t>(rest[i]));
        master[i] = bits_float((static_cast<uint32_t>(weight[i]) << 16) + signed_rest);
    }
    for (int64_t word = 0; word * kTieBits < numel; ++word) {
        for (uint32_t left = ties[word]; left != 0; left &= left - 1) {
            float& x = master[word * kTieBits + __builtin_ctz(left)];
            x = bits_float(float_bits(x) + 0x10000u);
        }
    }
}

inline uint32_t is_tie_rounded_down(float x) { return (float_bits(x) & 0x1ffffu) == 0x8000u; }

// The other way; the weight is written by who rounds it. Words of `ties` that stay as they are, nearly all,
// are not written.
inline void split_master(const float* __restrict master, uint16_t* __restrict rest, uint16_t* __restrict ties,
                         int64_t numel) {
    uint32_t any = 0;
    for (int64_t i = 0; i < numel; ++i) {
        rest[i] = static_cast<uint16_t>(float_bits(master[i]));
        any |= is_tie_rounded_down(master[i]);
    }
    for (int64_t word = 0; word * kTieBits < numel; ++word) {
        uint16_t bits = 0;
        for (int64_t k = 0; any != 0 && k < kTieBits && word * kTieBits + k < numel; ++k) {
            bits = static_cast<uint16_t>(bits | is_tie_rounded_down(master[word * kTieBits + k]) << k);
        }
        if (ties[word] != bits) {
            ties[word] = bits;
        }
    }
}

// Avalanche of 32 bits: two multiplications, three shifts.
inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

inline uint16_t round_up_by(float x, uint32_t noise16) {
    const uint32_t bits = float_bits(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + noise16) >> 16);
}

// To bf16, up with the probability that makes the mean exact. The noise of an element follows from the key
// and from the element's number alone; each moment takes half of it.
inline void round_moments(const float* __restrict m, const float* __restrict v, uint16_t* __restrict m_out,
                          uint16_t* __restrict v_out, int64_t numel, uint32_t first, uint32_t key) {
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t noise = mix((first + static_cast<uint32_t>(i)) * 0x9e3779b9u + key);
        m_out[i] = round_up_by(m[i], noise & 0xffffu);
        v_out[i] = round_up_by(v[i], noise >> 16);
    }
}

inline void widen_moment(const uint16_t* __restrict x, float* __restrict out, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        out[i] = bf16_to_float(x[i]);
    }
}

inline float block_max(const float* x, int64_t numel) {
    uint32_t most = 0;
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return bits_float(most);
}

// Bytes of one block: a magnitude on the dynamic scale, and a sign in the uppermost bit if there is one. The
// scale has decades of 10, the uppermost in `parts` equal parts, each one below in half as many. A code plus
// one is the number of its decade's parts plus its part: as a float, its exponent names the decade. Code 0 is
// zero, the largest is the block's maximum itself, so that a block which is widened and narrowed again keeps
// its scale and its codes.
struct Codec {
    bool is_signed;
    float parts() const { return is_signed ? 64.0f : 128.0f; }
    int decades() const { return is_signed ? 6 : 7; }
};

// The value of a code is (code + 1.5) * slope + offset, which is the middle of its part; by decade, of the
// exponent of code + 1.5.
struct CodeTables {
    alignas(64) float slope[16];
    alignas(64) float offset[16];

    CodeTables(Codec codec, float scale) : slope{}, offset{} {
        const float powers[] = {1.0f, 1e-1f, 1e-2f, 1e-3f, 1e-4f, 1e-5f, 1e-6f};
        float share = 0.9f / codec.parts();
        for (int below = 0; below < codec.decades(); ++below, share *= 2.0f) {
            const int place = place_of(codec.decades() - below);
            slope[place] = share * powers[below] * scale;
            offset[place] = -0.8f * powers[below] * scale;
        }
        offset[place_of(codec.decades() + 1)] = scale;
    }
    // Of an exponent, in the lower bits of a float's.
    static int place_of(int exponent) { return (127 + exponent) % 16; }
};

template <class V>
inline void decode(const uint8_t* codes, Codec codec, float scale, float* x, int64_t numel) {
    const CodeTables tables(codec, scale);
    int64_t i = 0;
    for (; i + V::kLanes <= numel; i += V::kLanes) {
        V::store(x + i, V::decode(codes + i, tables.slope, tables.offset, codec.is_signed));
    }
    for (; i < numel; ++i) {
        x[i] = Scalar::decode(codes + i, tables.slope, tables.offset, codec.is_signed);
    }
}

// Returns the block's scale.
template <class V>
inline float encode(const float* x, Codec codec, uint8_t* codes, int64_t numel) {
    const float scale = block_max(x, numel);
    const float factor = scale > 0.0f ? 1.0f / scale : 0.0f;
    int64_t i = 0;
    for (; i + V::kLanes <= numel; i += V::kLanes) {
        V::encode(V::load(x + i), factor, codec.parts(), codec.is_signed, codes + i);
    }
    for (; i < numel; ++i) {
        Scalar::encode(x[i], factor, codec.parts(), codec.is_signed, codes + i);
    }
    return scale;
}

}  // namespace
