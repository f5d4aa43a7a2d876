// Vector wrapper: AVX-512 F + BW + DQ + VL, 16 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
