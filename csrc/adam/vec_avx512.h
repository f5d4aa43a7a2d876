// Vector wrapper: AVX-512 F + BW + DQ + VL, 16 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vec_scalar.h"

namespace {

struct Avx512 {
    static constexpr int64_t kLanes = 16;
    using F = __m512;
    using H = __m256i;
    struct D {
        __m512d lo, hi;
    };

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static H load(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static void store(uint16_t* p, H x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
    static void stream(uint16_t* p, H x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
    static void fence() { _mm_sfence(); }

    static F widen_bf16(H x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    static F widen_fp16(H x) { return _mm512_cvtph_ps(x); }
    static H narrow_bf16(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i upper = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40)));
    }
    static H narrow_fp16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static F set1(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static F decode(const uint8_t* codes, const float* slope, const float* offset, bool is_signed) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __m512i magnitude = is_signed ? _mm512_and_si512(code, _mm512_set1_epi32(0x7f)) : code;
        const F at = add(_mm512_cvtepi32_ps(magnitude), set1(1.5f));
        const __m512i place = _mm512_srli_epi32(_mm512_castps_si512(at), 23);
        const F x = fma(at, _mm512_permutexvar_ps(place, _mm512_load_ps(slope)),
                        _mm512_permutexvar_ps(place, _mm512_load_ps(offset)));
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(code, 24), _mm512_set1_epi32(INT32_MIN));
        return is_signed ? _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign)) : x;
    }
    static void encode(F x, float factor, float parts, bool is_signed, uint8_t* codes) {
        const __m512i bits = _mm512_castps_si512(x);
        const F share =
            mul(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff))), set1(factor));
        F y = share, n = set1(parts);
        const auto lift = [&](float limit, float power, float part) {
            const __mmask16 below = _mm512_cmp_ps_mask(y, set1(limit), _CMP_LT_OQ);
            y = _mm512_mask_mul_ps(y, below, y, set1(power));
            n = _mm512_mask_mul_ps(n, below, n, set1(part));
        };
        lift(1e-4f, 1e4f, 0.0625f);
        lift(1e-2f, 1e2f, 0.25f);
        lift(1e-1f, 1e1f, 0.5f);
        F at = mul(fma(y, set1(kPerDecade), set1(1.0f - 0.1f * kPerDecade)), n);
        const __mmask16 top = _mm512_cmp_ps_mask(share, set1(1.0f - 0.225f / parts), _CMP_GT_OQ);
        at = _mm512_mask_mov_ps(at, top, set1(2.0f * parts));
        const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
        const F least = is_signed ? set1(1.0f) : _mm512_mask_mov_ps(set1(1.0f), positive, set1(2.0f));
        at = _mm512_max_ps(at, least);  // the second one if the first is no number
        const __m512i magnitude = _mm512_sub_epi32(_mm512_cvttps_epi32(at), _mm512_set1_epi32(1));
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                         _mm512_cvtepi32_epi8(is_signed ? _mm512_or_si512(magnitude, sign) : magnitude));
    }

    static D zero_d() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    static D add_square(D sum, F x) {
        const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        return {_mm512_fmadd_pd(lo, lo, sum.lo), _mm512_fmadd_pd(hi, hi, sum.hi)};
    }
    static void store_d(double* p, D x) {
        _mm512_storeu_pd(p, x.lo);
        _mm512_storeu_pd(p + 8, x.hi);
    }
};

}  // namespace
