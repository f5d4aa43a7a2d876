// The inverse of an Adam step, for training that steps before it knows whether it should.
#pragma once

#include <cstdint>

#include "host_ops.h"

namespace host_ops {

// Takes back the step that `args` describes, given the gradient that it had: parameters and moments as before
// it, within the rounding of what is stored. `first`: it was the first step, and the moments were zero.
//
// One step back costs roundings only. Each further one divides what the moments lost to rounding by their
// beta. A moment whose beta is 0 left no trace in the step; it comes back as zero. Where the gradient was not
// finite nothing is left to go back to, and the result is not finite either.
void run_rollback(const AdamArgs& args, bool first, int64_t numel);

}  // namespace host_ops
