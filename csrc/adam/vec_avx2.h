// Vector wrapper: AVX2 + FMA + F16C, 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vec_scalar.h"

namespace {

struct Avx2 {
    static constexpr int64_t kLanes = 8;
    using F = __m256;
    using H = __m128i;
    struct D {
        __m256d lo, hi;
    };

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static H load(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static void store(uint16_t* p, H x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
    static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
    static void stream(uint16_t* p, H x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), x); }
    static void fence() { _mm_sfence(); }

    static F widen_bf16(H x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
    static F widen_fp16(H x) { return _mm256_cvtph_ps(x); }
    static H narrow_bf16(F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i upper = _mm256_srli_epi32(bits, 16);
        const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
    static H narrow_fp16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static F set1(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

    static F decode(const uint8_t* codes, const float* slope, const float* offset, bool is_signed) {
        const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
        const __m256i magnitude = is_signed ? _mm256_and_si256(code, _mm256_set1_epi32(0x7f)) : code;
        const F at = add(_mm256_cvtepi32_ps(magnitude), set1(1.5f));
        const __m256i place =
            _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(at), 23), _mm256_set1_epi32(15));
        const F x = fma(at, _mm256_i32gather_ps(slope, place, 4), _mm256_i32gather_ps(offset, place, 4));
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 24), _mm256_set1_epi32(INT32_MIN));
        return is_signed ? _mm256_or_ps(x, _mm256_castsi256_ps(sign)) : x;
    }
    static void encode(F x, float factor, float parts, bool is_signed, uint8_t* codes) {
        const __m256i bits = _mm256_castps_si256(x);
        const F share =
            mul(_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff))), set1(factor));
        F y = share, n = set1(parts);
        const auto lift = [&](float limit, float power, float part) {
            const F below = _mm256_cmp_ps(y, set1(limit), _CMP_LT_OQ);
            y = _mm256_blendv_ps(y, mul(y, set1(power)), below);
            n = _mm256_blendv_ps(n, mul(n, set1(part)), below);
        };
        lift(1e-4f, 1e4f, 0.0625f);
        lift(1e-2f, 1e2f, 0.25f);
        lift(1e-1f, 1e1f, 0.5f);
        F at = mul(fma(y, set1(kPerDecade), set1(1.0f - 0.1f * kPerDecade)), n);
        const F top = _mm256_cmp_ps(share, set1(1.0f - 0.225f / parts), _CMP_GT_OQ);
        at = _mm256_blendv_ps(at, set1(2.0f * parts), top);
        const F positive = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
        const F least = is_signed ? set1(1.0f) : _mm256_blendv_ps(set1(1.0f), set1(2.0f), positive);
        at = _mm256_max_ps(at, least);  // the second one if the first is no number
        __m256i words = _mm256_sub_epi32(_mm256_cvttps_epi32(at), _mm256_set1_epi32(1));
        if (is_signed) {
            words = _mm256_or_si256(words,
                                    _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
        }
        const __m128i halves =
            _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(halves, halves));
    }

    static D zero_d() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    static D add_square(D sum, F x) {
        const __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const __m256d hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        return {_mm256_fmadd_pd(lo, lo, sum.lo), _mm256_fmadd_pd(hi, hi, sum.hi)};
    }
    static void store_d(double* p, D x) {
        _mm256_storeu_pd(p, x.lo);
        _mm256_storeu_pd(p + 4, x.hi);
    }
};

}  // namespace
