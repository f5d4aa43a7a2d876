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

// Position of y = |x| / scale, from 0 to 1, on the dynamic scale: seven decades, the uppermost in `parts`
// equal parts, each one below in half as many. Returns the parts of the decade, which is the number of its
// first one too, plus the part; what lies below the last decade counts as its part.
inline int32_t dynamic_part(float y, float parts) {
    const float least = parts * (1.0f / 64.0f);
    const float limits[] = {1e-4f, 1e-2f, 1e-1f}, powers[] = {1e4f, 1e2f, 1e1f},
                shares[] = {1.0f / 16.0f, 1.0f / 4.0f, 1.0f / 2.0f};
    for (int k = 0; k < 3; ++k) {
        parts = y < limits[k] ? parts * shares[k] : parts;
        y = y < limits[k] ? y * powers[k] : y;
    }
    parts = parts > least ? parts : least;
    float part = (y - 0.1f) * (parts * (1.0f / 0.9f));
    part = part > 0.0f ? part : 0.0f;
    part = part < parts - 1.0f ? part : parts - 1.0f;
    return static_cast<int32_t>(parts) + static_cast<int32_t>(part);
}

inline float inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// In a loop of its own: mixed with the loops above it would make the compiler compute in bytes.
inline void narrow(const int32_t* __restrict wide, uint8_t* __restrict codes, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        codes[i] = static_cast<uint8_t>(wide[i]);
    }
}

// One byte: sign and 7 bits of magnitude, 0 and 127 parts. Returns the block's scale.
inline float encode_signed(const float* __restrict x, uint8_t* __restrict codes, int64_t numel) {
    const float scale = block_max(x, numel);
    const float factor = inverse(scale);
    int32_t wide[kBlockNumel];
    for (int64_t i = 0; i < numel; ++i) {
        const float y = bits_float(float_bits(x[i]) & 0x7fffffffu) * factor;
        const int32_t magnitude = y < 2.75e-7f ? 0 : dynamic_part(y, 64.0f);
        const int32_t sign = static_cast<int32_t>(float_bits(x[i]) >> 24) & 0x80;
        wide[i] = magnitude | sign;
    }
    narrow(wide, codes, numel);
    return scale;
}

// One byte: 0, 254 parts, and 255 for the maximum itself. What is more than 0 stays so: a second moment of 0
// under a first moment that is not would make a step as large as 1 / eps.
inline float encode_unsigned(const float* __restrict x, uint8_t* __restrict codes, int64_t numel) {
    const float scale = block_max(x, numel);
    const float factor = inverse(scale);
    int32_t wide[kBlockNumel];
    for (int64_t i = 0; i < numel; ++i) {
        const float y = x[i] * factor;
        const int32_t part = y > 0.99824f ? 255 : dynamic_part(y, 128.0f) - 1;
        wide[i] = x[i] > 0.0f ? part : 0;
    }
    narrow(wide, codes, numel);
    return scale;
}

inline void decode(const uint8_t* __restrict codes, const float* __restrict table, float scale,
                   float* __restrict x, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        x[i] = table[codes[i]] * scale;
    }
}

}  // namespace
