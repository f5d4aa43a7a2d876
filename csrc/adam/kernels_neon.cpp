// Level "neon": always present on AArch64.
#include "host_ops.h"

#if defined(__aarch64__)

#include "kernel.h"
#include "vec_neon.h"

const host_ops::KernelTable* host_ops::neon_kernels() {
    static constexpr KernelTable table = make_table<Neon>("neon");
    return &table;
}

#else

const host_ops::KernelTable* host_ops::neon_kernels() { return nullptr; }

#endif
