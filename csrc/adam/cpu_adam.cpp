// Python binding of the host kernels: checks arguments by name, rounds constants, calls without the GIL.
// pybind.h and Tensor.h instead of torch/extension.h: a third of the compile time and of the compiler's
// memory.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "adam_queue.h"
#include "dispatch.h"
#include "rollback.h"

namespace {

namespace py = pybind11;
using host_ops::Stream;

const host_ops::KernelTable& kernels() {
    static const host_ops::KernelTable* const table = [] {
        const char* limit = std::getenv("DS_SIMD_LEVEL");
        const auto* selected = host_ops::select_kernels(limit == nullptr ? "" : limit);
        TORCH_CHECK_VALUE(selected != nullptr,
                          "DS_SIMD_LEVEL: expected a level that this processor has, got '", limit,
                          "'. Unset it, or set one of scalar, avx2, avx512, neon.");
        return selected;
    }();
    return *table;
}

host_ops::Dtype stream_dtype(const char* name, const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat:
            return host_ops::Dtype::kFloat32;
        case at::kBFloat16:
            return host_ops::Dtype::kBfloat16;
        case at::kHalf:
            return host_ops::Dtype::kFloat16;
        default:
            TORCH_CHECK_VALUE(false, name, ": expected dtype float32, bfloat16 or float16, got ",
                              tensor.scalar_type(), ". Convert it first.");
    }
}

Stream stream(const char* name, const at::Tensor& tensor, int64_t numel) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, name,
                      ": expected a dense CPU tensor, got ",
                      tensor.defined() ? tensor.device().str() + " " + c10::str(tensor.layout()) : "none",
                      ". Keep the optimizer's tensors on the host.");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": expected a contiguous tensor, got sizes ",
                      tensor.sizes(), " with strides ", tensor.strides(),
                      ". Call .contiguous() and keep the result.");
    TORCH_CHECK_VALUE(tensor.numel() == numel, name, ": expected ", numel, " elements, got ", tensor.numel(),
                      ". Give tensors of one size.");
    return {tensor.data_ptr(), stream_dtype(name, tensor)};
}

void* typed_data(const char* name, const at::Tensor& tensor, int64_t numel, at::ScalarType dtype) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
                          tensor.numel() == numel,
                      name, ": expected ", numel, " contiguous elements of ", dtype, " on the host, got ",
                      tensor.numel(), " of ", tensor.scalar_type(), " on ", tensor.device().str(),
                      ". See deepspeed.runtime.zero.forms.");
    return tensor.data_ptr();
}

struct Hyper {
    int64_t step;
    double lr, beta1, beta2, eps, weight_decay;
    bool adamw_mode, bias_correction;
    double grad_scale;
};

// Smaller forms, as Python gives them.
struct SmallForms {
    std::optional<at::Tensor> ties, exp_avg_scale, exp_avg_sq_scale;
    int64_t noise_key;  // less than 0: rounded to nearest
    int64_t first;
};

// Computed in double and rounded once, as torch does with its Python floats.
host_ops::AdamArgs adam_args(const Hyper& h) {
    TORCH_CHECK_VALUE(h.step >= 1, "step: expected 1 or more, got ", h.step, ". Count from 1.");
    const double steps = static_cast<double>(h.step);
    const double correction1 = h.bias_correction ? 1.0 - std::pow(h.beta1, steps) : 1.0;
    const double correction2 = h.bias_correction ? 1.0 - std::pow(h.beta2, steps) : 1.0;
    host_ops::AdamArgs args{};
    args.grad_scale = static_cast<float>(h.grad_scale);
    args.decay = static_cast<float>(h.adamw_mode ? 1.0 - h.lr * h.weight_decay : 1.0);
    args.l2 = static_cast<float>(h.adamw_mode ? 0.0 : h.weight_decay);
    args.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
    args.beta2 = static_cast<float>(h.beta2);
    args.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
    args.neg_step_size = static_cast<float>(-h.lr / correction1);
    args.bias_correction2_sqrt = static_cast<float>(std::sqrt(correction2));
    args.eps = static_cast<float>(h.eps);
    return args;
}

int64_t blocks_of(int64_t numel, int64_t block) { return (numel + block - 1) / block; }

// Fills in the master and its weights in two halves.
void set_halves(host_ops::AdamArgs& args, const at::Tensor& rest, const at::Tensor& out,
                const at::Tensor& ties) {
    const int64_t numel = rest.numel();
    args.master = {typed_data("master", rest, numel, at::kShort), host_ops::Dtype::kBfloat16};
    args.out = {typed_data("out", out, numel, at::kBFloat16), host_ops::Dtype::kBfloat16};
    args.forms.ties =
        static_cast<uint16_t*>(typed_data("ties", ties, blocks_of(numel, host_ops::kTieBits), at::kShort));
}

// Fills in the arrays of a step; returns their number of elements.
int64_t set_streams(host_ops::AdamArgs& args, const at::Tensor& master, const at::Tensor& grad,
                    const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                    const std::optional<at::Tensor>& out) {
    const int64_t numel = master.numel();
    args.master = stream("master", master, numel);
    args.grad = stream("grad", grad, numel);
    args.exp_avg = stream("exp_avg", exp_avg, numel);
    args.exp_avg_sq = stream("exp_avg_sq", exp_avg_sq, numel);
    if (out.has_value()) {
        args.out = stream("out", *out, numel);
    }
    return numel;
}

float* scales(const char* name, const std::optional<at::Tensor>& tensor, int64_t numel) {
    TORCH_CHECK_VALUE(tensor.has_value(), name, ": expected scales for both moments, got none.");
    const int64_t blocks = blocks_of(numel, host_ops::kBlockNumel);
    return static_cast<float*>(typed_data(name, *tensor, blocks, at::kFloat));
}

// The same, where not everything is in a floating type of its own.
int64_t set_small_streams(host_ops::AdamArgs& args, const at::Tensor& master, const at::Tensor& grad,
                          const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                          const std::optional<at::Tensor>& out, const SmallForms& forms) {
    const int64_t numel = master.numel();
    args.grad = stream("grad", grad, numel);
    if (forms.ties.has_value()) {
        TORCH_CHECK_VALUE(out.has_value(),
                          "out: expected the weights, got none. They hold half of the master.");
        set_halves(args, master, *out, *forms.ties);
    } else {
        args.master = stream("master", master, numel);
        args.out = out.has_value() ? stream("out", *out, numel) : Stream{};
    }
    args.forms.first = static_cast<uint32_t>(forms.first);
    if (forms.exp_avg_scale.has_value()) {
        const auto byte = host_ops::Dtype::kBfloat16;  // not looked at
        args.exp_avg = {typed_data("exp_avg", exp_avg, numel, at::kByte), byte};
        args.exp_avg_sq = {typed_data("exp_avg_sq", exp_avg_sq, numel, at::kByte), byte};
        args.forms.exp_avg_scale = scales("exp_avg_scale", forms.exp_avg_scale, numel);
        args.forms.exp_avg_sq_scale = scales("exp_avg_sq_scale", forms.exp_avg_sq_scale, numel);
        return numel;
    }
    args.exp_avg = stream("exp_avg", exp_avg, numel);
    args.exp_avg_sq = stream("exp_avg_sq", exp_avg_sq, numel);
    args.forms.stochastic = forms.noise_key >= 0;
    args.forms.noise_key = static_cast<uint32_t>(forms.noise_key);
    TORCH_CHECK_VALUE(
        !args.forms.stochastic ||
            (exp_avg.scalar_type() == at::kBFloat16 && exp_avg_sq.scalar_type() == at::kBFloat16),
        "noise_key: expected bf16 moments to round by chance, got ", exp_avg.scalar_type(), ".");
    return numel;
}

struct Step {
    host_ops::AdamArgs args;
    int64_t numel;
};

Step make_step(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& out, const Hyper& hyper,
               const SmallForms& forms) {
    Step step{adam_args(hyper), 0};
    const bool small = forms.ties.has_value() || forms.exp_avg_scale.has_value() || forms.noise_key >= 0;
    step.numel = small ? set_small_streams(step.args, master, grad, exp_avg, exp_avg_sq, out, forms)
                       : set_streams(step.args, master, grad, exp_avg, exp_avg_sq, out);
    return step;
}

using OptionalTensor = std::optional<at::Tensor>;

void adam_step(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const OptionalTensor& out, int64_t step, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool adamw_mode, bool bias_correction,
               double grad_scale, int num_threads, const OptionalTensor& ties,
               const OptionalTensor& exp_avg_scale, const OptionalTensor& exp_avg_sq_scale, int64_t noise_key,
               int64_t first) {
    const Hyper hyper{step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, grad_scale};
    const SmallForms forms{ties, exp_avg_scale, exp_avg_sq_scale, noise_key, first};
    const Step s = make_step(master, grad, exp_avg, exp_avg_sq, out, hyper, forms);
    host_ops::run_adam(kernels(), s.args, s.numel, num_threads);
}

int64_t submit(host_ops::AdamQueue& queue, const at::Tensor& master, const at::Tensor& grad,
               const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const OptionalTensor& out,
               int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool adamw_mode, bool bias_correction, double grad_scale, const OptionalTensor& ties,
               const OptionalTensor& exp_avg_scale, const OptionalTensor& exp_avg_sq_scale, int64_t noise_key,
               int64_t first) {
    const Hyper hyper{step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, grad_scale};
    const SmallForms forms{ties, exp_avg_scale, exp_avg_sq_scale, noise_key, first};
    TORCH_CHECK(queue.has_threads(),
                "AdamQueue: expected the process that made it, got a forked child of it. Make another.");
    const Step s = make_step(master, grad, exp_avg, exp_avg_sq, out, hyper, forms);
    return queue.submit(s.args, s.numel);
}

// Between a form and fp32, for checkpoints and for whoever looks at a parameter's state.
void join_master(const at::Tensor& rest, const at::Tensor& weight, const at::Tensor& ties,
                 const at::Tensor& master) {
    host_ops::AdamArgs args{};
    set_halves(args, rest, weight, ties);
    auto* const x = static_cast<float*>(typed_data("master", master, rest.numel(), at::kFloat));
    host_ops::run_join(kernels(), args, x, rest.numel());
}

void split_master(const at::Tensor& master, const at::Tensor& rest, const at::Tensor& weight,
                  const at::Tensor& ties) {
    host_ops::AdamArgs args{};
    set_halves(args, rest, weight, ties);
    const auto* const x = static_cast<const float*>(typed_data("master", master, rest.numel(), at::kFloat));
    host_ops::run_split(kernels(), args, x, rest.numel());
}

void decode_moment(const at::Tensor& codes, const at::Tensor& scale, bool is_signed, const at::Tensor& out) {
    const int64_t numel = codes.numel();
    auto* const x = static_cast<float*>(typed_data("out", out, numel, at::kFloat));
    const auto* const bytes = static_cast<const uint8_t*>(typed_data("codes", codes, numel, at::kByte));
    host_ops::run_decode(kernels(), bytes, scales("scale", scale, numel), is_signed, x, numel);
}

void encode_moment(const at::Tensor& values, bool is_signed, const at::Tensor& codes,
                   const at::Tensor& scale) {
    const int64_t numel = codes.numel();
    const auto* const x = static_cast<const float*>(typed_data("values", values, numel, at::kFloat));
    auto* const bytes = static_cast<uint8_t*>(typed_data("codes", codes, numel, at::kByte));
    host_ops::run_encode(kernels(), x, is_signed, bytes, scales("scale", scale, numel), numel);
}

void roof(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
          const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& out, int num_threads) {
    host_ops::AdamArgs args{};
    const int64_t numel = set_streams(args, master, grad, exp_avg, exp_avg_sq, out);
    host_ops::run_roof(kernels(), args, numel, num_threads);
}

double accumulate(const at::Tensor& dst, const at::Tensor& src, bool add, int num_threads) {
    const int64_t numel = dst.numel();
    const auto mode = add ? host_ops::AccumulateMode::kAdd : host_ops::AccumulateMode::kStore;
    return host_ops::run_accumulate(kernels(), {stream("dst", dst, numel), stream("src", src, numel), mode},
                                    numel, num_threads);
}

double sum_of_squares(const at::Tensor& src, int num_threads) {
    const int64_t numel = src.numel();
    const Stream s = stream("src", src, numel);
    return host_ops::run_accumulate(kernels(), {s, s, host_ops::AccumulateMode::kReadOnly}, numel,
                                    num_threads);
}

// Stock's interface keeps a mode under an id between calls; everything else comes with each call.
class AdamModes {
 public:
    void set(int id, bool adamw_mode) {
        const std::lock_guard<std::mutex> guard(mutex_);
        modes_[id] = adamw_mode;
    }
    void erase(int id) {
        const std::lock_guard<std::mutex> guard(mutex_);
        modes_.erase(id);
    }
    bool get(int id) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = modes_.find(id);
        TORCH_CHECK(found != modes_.end(), "optimizer_id: expected an id given to create_adam, got ", id,
                    ". Call create_adam first, and not after destroy_adam.");
        return found->second;
    }

 private:
    std::mutex mutex_;
    std::map<int, bool> modes_;
};

AdamModes& modes() {
    static AdamModes instance;
    return instance;
}

int create_adam(int optimizer_id, double, double, double, double, double, bool adamw_mode, bool should_log) {
    modes().set(optimizer_id, adamw_mode);
    if (should_log) {
        const py::gil_scoped_acquire gil;
        py::print("Adam on the host,", kernels().name, "kernels,", adamw_mode ? "AdamW" : "Adam", "mode");
    }
    return 0;
}

int destroy_adam(int optimizer_id) {
    modes().erase(optimizer_id);
    return 0;
}

// The step of a call through stock's interface, with the arrays under its names.
Step stock_step(int optimizer_id, Hyper hyper, const at::Tensor& params, const at::Tensor& grads,
                const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq) {
    hyper.adamw_mode = modes().get(optimizer_id);
    Step s{adam_args(hyper), params.numel()};
    s.args.master = stream("params", params, s.numel);
    s.args.grad = stream("grads", grads, s.numel);
    s.args.exp_avg = stream("exp_avg", exp_avg, s.numel);
    s.args.exp_avg_sq = stream("exp_avg_sq", exp_avg_sq, s.numel);
    return s;
}

int adam_update(int optimizer_id, int64_t step, double lr, double beta1, double beta2, double epsilon,
                double weight_decay, bool bias_correction, const at::Tensor& params, const at::Tensor& grads,
                const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq) {
    const Hyper hyper{step, lr, beta1, beta2, epsilon, weight_decay, false, bias_correction, 1.0};
    const Step s = stock_step(optimizer_id, hyper, params, grads, exp_avg, exp_avg_sq);
    host_ops::run_adam(kernels(), s.args, s.numel, 0);
    return 0;
}

int adam_rollback(int optimizer_id, int64_t step, double lr, double beta1, double beta2, double epsilon,
                  double weight_decay, bool bias_correction, const at::Tensor& params,
                  const at::Tensor& grads, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq) {
    const Hyper hyper{step, lr, beta1, beta2, epsilon, weight_decay, false, bias_correction, 1.0};
    const Step s = stock_step(optimizer_id, hyper, params, grads, exp_avg, exp_avg_sq);
    TORCH_CHECK_VALUE(s.args.decay != 0.0f, "weight_decay: expected lr * weight_decay other than 1, got ",
                      weight_decay, " with lr ", lr, ". Such a step cannot be taken back.");
    host_ops::run_rollback(s.args, step == 1, s.numel);
    return 0;
}

// Messages without torch's C++ stack: they name the user's argument, which is what the user can change.
void translate(std::exception_ptr error) {
    try {
        if (error) {
            std::rethrow_exception(error);
        }
    } catch (const c10::ValueError& e) {
        PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
    } catch (const c10::Error& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using py::arg;
    using NoGil = py::call_guard<py::gil_scoped_release>;
    const py::none none;
    py::register_local_exception_translator(translate);
    m.def("adam_step", adam_step, NoGil(), "One fused Adam step in place; see deepspeed.ops.adam.",
          arg("master"), arg("grad"), arg("exp_avg"), arg("exp_avg_sq"), arg("out"), arg("step"), arg("lr"),
          arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("adamw_mode"),
          arg("bias_correction"), arg("grad_scale"), arg("num_threads"), arg("ties") = none,
          arg("exp_avg_scale") = none, arg("exp_avg_sq_scale") = none, arg("noise_key") = -1,
          arg("first") = 0);
    m.def("join_master", join_master, NoGil(), "Weights and rest to fp32.", arg("rest"), arg("weight"),
          arg("ties"), arg("master"));
    m.def("split_master", split_master, NoGil(), "fp32 to weights and rest.", arg("master"), arg("rest"),
          arg("weight"), arg("ties"));
    m.def("decode_moment", decode_moment, NoGil(), "Bytes and scales to fp32.", arg("codes"), arg("scale"),
          arg("signed"), arg("out"));
    m.def("encode_moment", encode_moment, NoGil(), "fp32 to bytes and scales.", arg("values"), arg("signed"),
          arg("codes"), arg("scale"));
    using QueueHolder = std::unique_ptr<host_ops::AdamQueue, host_ops::EndWithThreads>;
    py::class_<host_ops::AdamQueue, QueueHolder>(m, "AdamQueue", "Steps in order on threads of their own.")
        .def(py::init([](int threads) { return QueueHolder(new host_ops::AdamQueue(kernels(), threads)); }),
             arg("num_threads"))
        .def("submit", submit, NoGil(), "Queue one step, its output left in the cache; returns its ticket.",
             arg("master"), arg("grad"), arg("exp_avg"), arg("exp_avg_sq"), arg("out"), arg("step"),
             arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("adamw_mode"),
             arg("bias_correction"), arg("grad_scale"), arg("ties") = none, arg("exp_avg_scale") = none,
             arg("exp_avg_sq_scale") = none, arg("noise_key") = -1, arg("first") = 0)
        .def("wait", &host_ops::AdamQueue::wait, NoGil(), "Until a step is done.", arg("ticket"));
    m.def("roof", roof, NoGil(), "The memory traffic of adam_step, for benchmarks.", arg("master"),
          arg("grad"), arg("exp_avg"), arg("exp_avg_sq"), arg("out"), arg("num_threads"));
    m.def("accumulate", accumulate, NoGil(), "dst = src or dst += src; returns the sum of squares of dst.",
          arg("dst"), arg("src"), arg("add"), arg("num_threads"));
    m.def("sum_of_squares", sum_of_squares, NoGil(), "Sum of squares in double.", arg("src"),
          arg("num_threads"));
    m.def("simd_level", [] { return std::string(kernels().name); }, "Name of the vector level in use.");
    m.def("create_adam", create_adam, NoGil(), "Stock's entry: remembers the mode under an id.",
          arg("optimizer_id"), arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"),
          arg("adamw_mode"), arg("should_log"));
    m.def("adam_update", adam_update, NoGil(), "Stock's entry: one step in place.", arg("optimizer_id"),
          arg("step"), arg("lr"), arg("beta1"), arg("beta2"), arg("epsilon"), arg("weight_decay"),
          arg("bias_correction"), arg("params"), arg("grads"), arg("exp_avg"), arg("exp_avg_sq"));
    m.def("adam_rollback", adam_rollback, NoGil(), "Stock's entry: takes one step back.", arg("optimizer_id"),
          arg("step"), arg("lr"), arg("beta1"), arg("beta2"), arg("epsilon"), arg("weight_decay"),
          arg("bias_correction"), arg("params"), arg("grads"), arg("exp_avg"), arg("exp_avg_sq"));
    m.def("destroy_adam", destroy_adam, NoGil(), "Stock's entry: forgets an id.", arg("optimizer_id"));
}
