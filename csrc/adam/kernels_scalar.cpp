// Level "scalar": the compiler's own baseline instruction set.
#include "kernel.h"

namespace host_ops {

const KernelTable* scalar_kernels() {
    static constexpr KernelTable table = make_table<Scalar>("scalar");
    return &table;
}

}  // namespace host_ops
