// Vector wrapper: AVX2 + FMA + F16C, 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
