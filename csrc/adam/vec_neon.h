// Vector wrapper: AArch64 NEON, 4 floats.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "vec_scalar.h"

namespace {

struct Neon {
    static constexpr int64_t kLanes = 4;
    using F = float32x4_t;
    using H = uint16x4_t;
    struct D {
        float64x2_t lo, hi;
    };

    static F load(const float* p) { return vld1q_f32(p); }
    static H load(const uint16_t* p) { return vld1_u16(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static void store(uint16_t* p, H x) { vst1_u16(p, x); }
    static void stream(float* p, F x) { store(p, x); }
    static void stream(uint16_t* p, H x) { store(p, x); }
    static void fence() {}

    static F widen_bf16(H x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
    static F widen_fp16(H x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
    static H narrow_bf16(F x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t upper = vshrq_n_u32(bits, 16);
        const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
        const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
        const uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
        return vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet));
    }
    static H narrow_fp16(F x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

    static F set1(float x) { return vdupq_n_f32(x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

    // Lane by lane: there is no table of 16 floats to look up in.
    static F decode(const uint8_t* codes, const float* slope, const float* offset, bool is_signed) {
        float x[kLanes];
        for (int64_t k = 0; k < kLanes; ++k) {
            x[k] = Scalar::decode(codes + k, slope, offset, is_signed);
        }
        return load(x);
    }
    static void encode(F x, float factor, float parts, bool is_signed, uint8_t* codes) {
        float lanes[kLanes];
        store(lanes, x);
        for (int64_t k = 0; k < kLanes; ++k) {
            Scalar::encode(lanes[k], factor, parts, is_signed, codes + k);
        }
    }

    static D zero_d() { return {vdupq_n_f64(0), vdupq_n_f64(0)}; }
    static D add_square(D sum, F x) {
        const float64x2_t lo = vcvt_f64_f32(vget_low_f32(x));
        const float64x2_t hi = vcvt_high_f64_f32(x);
        return {vfmaq_f64(sum.lo, lo, lo), vfmaq_f64(sum.hi, hi, hi)};
    }
    static void store_d(double* p, D x) {
        vst1q_f64(p, x.lo);
        vst1q_f64(p + 2, x.hi);
    }
};

}  // namespace
