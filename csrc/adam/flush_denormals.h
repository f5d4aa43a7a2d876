// Denormal inputs and results as zero, for a while.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace host_ops {

// Denormal inputs and results count as zero while this lives: they slow arithmetic several times over.
class FlushDenormals {
 public:
    FlushDenormals() : saved_(read()) { write(saved_ | kFlush); }
    ~FlushDenormals() { write(saved_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
    using Control = unsigned int;
    static constexpr Control kFlush = 0x8040;  // flush-to-zero and denormals-are-zero
    static Control read() { return _mm_getcsr(); }
    static void write(Control value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Control = uint64_t;
    static constexpr Control kFlush = Control{1} << 24;
    static Control read() {
        Control value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Control value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
    using Control = int;
    static constexpr Control kFlush = 0;
    static Control read() { return 0; }
    static void write(Control) {}
#endif
    const Control saved_;
};

}  // namespace host_ops
