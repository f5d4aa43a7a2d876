// Vector wrapper of width 1: the tail of every level, and the whole of the scalar level.
// A wrapper has a vector of floats F, one of as many 16-bit words H, one of as many doubles D. `stream`
// stores past the cache, to an address that is a multiple of the vector; `fence` makes such stores visible.
// Everything is in an unnamed namespace because each level compiles its own copy with its own instruction
// set.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline uint32_t float_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float bits_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Round to nearest even by integers: unlike hardware bf16 conversion this keeps denormals. A NaN stays one,
// quiet.
inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<uint16_t>((bits >> 16) | 0x40u);
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

// The bits of the processors' own fp16 conversions (which ignore flush-to-zero), NaN payload included.
inline uint16_t float_to_fp16(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // 2^-14 and above: normal
        const uint32_t rebased = magnitude - 0x38000000u;
        half = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    } else if (magnitude < 0x33000000u) {  // below 2^-25, half of the least denormal
        half = 0;
    } else {
        const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t shift = 126u - (magnitude >> 23);
        const uint32_t rest = mantissa & ((1u << shift) - 1u);
        const uint32_t tie = 1u << (shift - 1u);
        half = mantissa >> shift;
        half += (rest > tie || (rest == tie && (half & 1u))) ? 1u : 0u;
    }
    return static_cast<uint16_t>(sign | half);
}

inline float fp16_to_float(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t exponent = (x >> 10) & 0x1fu;
    const uint32_t mantissa = x & 0x3ffu;
    if (exponent == 0x1fu) {
        const uint32_t quiet = mantissa ? 0x400000u : 0u;
        return bits_float(sign | 0x7f800000u | quiet | (mantissa << 13));
    }
    if (exponent == 0) {  // denormal: mantissa * 2^-24, exact and a normal float
        return bits_float(sign | float_bits(static_cast<float>(mantissa) * 5.9604644775390625e-8f));
    }
    return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

constexpr float kPerDecade = 1.0f / 0.9f;

struct Scalar {
    static constexpr int64_t kLanes = 1;
    using F = float;
    using H = uint16_t;
    using D = double;

    static F load(const float* p) { return *p; }
    static H load(const uint16_t* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static void store(uint16_t* p, H x) { *p = x; }
    static void stream(float* p, F x) { *p = x; }
    static void stream(uint16_t* p, H x) { *p = x; }
    static void fence() {}

    static F widen_bf16(H x) { return bf16_to_float(x); }
    static F widen_fp16(H x) { return fp16_to_float(x); }
    static H narrow_bf16(F x) { return float_to_bf16(x); }
    static H narrow_fp16(F x) { return float_to_fp16(x); }

    static F set1(float x) { return x; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return __builtin_sqrtf(a); }
    static F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }

    // Codes of a quantised block, see forms.h.
    static F decode(const uint8_t* code, const float* slope, const float* offset, bool is_signed) {
        const uint32_t magnitude = is_signed ? *code & 0x7fu : *code;
        const float at = static_cast<float>(magnitude) + 1.5f;
        const uint32_t place = (float_bits(at) >> 23) & 15u;
        const float x = fma(at, slope[place], offset[place]);
        return is_signed ? bits_float(float_bits(x) | (*code & 0x80u) << 24) : x;
    }
    static void encode(F x, float factor, float parts, bool is_signed, uint8_t* code) {
        const uint32_t bits = float_bits(x);
        const float share = bits_float(bits & 0x7fffffffu) * factor;
        float y = share, n = parts;
        n = y < 1e-4f ? n * 0.0625f : n;
        y = y < 1e-4f ? y * 1e4f : y;
        n = y < 1e-2f ? n * 0.25f : n;
        y = y < 1e-2f ? y * 1e2f : y;
        n = y < 1e-1f ? n * 0.5f : n;
        y = y < 1e-1f ? y * 1e1f : y;
        float at = fma(y, kPerDecade, 1.0f - 0.1f * kPerDecade) * n;
        at = share > 1.0f - 0.225f / parts ? 2.0f * parts : at;
        // A second moment that is not zero stays so: under a first one that is not either it would make a
        // step as large as 1 / eps.
        const float least = !is_signed && x > 0.0f ? 2.0f : 1.0f;
        at = at > least ? at : least;
        const uint32_t magnitude = static_cast<uint32_t>(static_cast<int32_t>(at)) - 1u;
        *code = static_cast<uint8_t>(is_signed ? magnitude | (bits >> 24 & 0x80u) : magnitude);
    }

    static D zero_d() { return 0.0; }
    // Squares of floats are exact in double, so fused and separate rounding agree.
    static D add_square(D sum, F x) { return sum + static_cast<double>(x) * static_cast<double>(x); }
    static void store_d(double* p, D x) { *p = x; }
};

}  // namespace
