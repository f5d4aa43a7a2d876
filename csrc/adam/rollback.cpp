#include "rollback.h"

#include "dispatch.h"
#include "flush_denormals.h"
#include "kernel.h"

namespace host_ops {
namespace {

// A second moment below this share of its successor was rounded off in it.
constexpr double kRoundedOff = 1.0 / (1 << 24);

double inverse(double beta) { return beta == 0.0 ? 0.0 : 1.0 / beta; }

// In double, so that what is lost is what the step itself rounded off.
class Rollback {
 public:
    Rollback(const AdamArgs& args, bool first)
        : args_(args),
          weight1_(args.one_minus_beta1),
          weight2_(args.one_minus_beta2),
          per_beta1_(first ? 0.0 : inverse(1.0 - weight1_)),
          per_beta2_(first ? 0.0 : inverse(args.beta2)),
          least_(least_square(1.0 - weight1_, args.beta2)) {}

    void operator()(int64_t i) const {
        const float m = load<Scalar>(args_.exp_avg, i);
        const float v = load<Scalar>(args_.exp_avg_sq, i);
        const double change = adam_change<Scalar>(args_, m, v);  // the bits that the step added
        const double p = (load<Scalar>(args_.master, i) - change) / args_.decay;
        const double before = store<Scalar>(args_.master, i, static_cast<float>(p));
        const double g =
            static_cast<double>(load<Scalar>(args_.grad, i)) * args_.grad_scale + before * args_.l2;
        const double m_before = (m - weight1_ * g) * per_beta1_;
        double v_before = (v - weight2_ * g * g) * per_beta2_;
        if (v_before < kRoundedOff * v) {
            // Zero, under a first moment that is not, would make the next step as large as 1 / eps.
            v_before = least_ * m_before * m_before;
        }
        store<Scalar>(args_.exp_avg, i, static_cast<float>(m_before));
        store<Scalar>(args_.exp_avg_sq, i, static_cast<float>(v_before));
    }

 private:
    // The least second moment that gradients can leave beside a first moment of 1 (Cauchy and Schwarz).
    double least_square(double beta1, double beta2) const {
        const double ratio = beta1 * beta1 * inverse(beta2);
        return ratio < 1.0 ? weight2_ * (1.0 - ratio) / (weight1_ * weight1_) : 0.0;
    }

    const AdamArgs args_;
    const double weight1_, weight2_;
    const double per_beta1_, per_beta2_;  // 0: the moment before was zero, or left no trace
    const double least_;
};

}  // namespace

void run_rollback(const AdamArgs& args, bool first, int64_t numel) {
    const Rollback rollback(args, first);
#pragma omp parallel if (numel > kTaskNumel)
    {
        const FlushDenormals flush;  // as in the step
#pragma omp for schedule(static)
        for (int64_t i = 0; i < numel; ++i) {
            rollback(i);
        }
    }
}

}  // namespace host_ops
