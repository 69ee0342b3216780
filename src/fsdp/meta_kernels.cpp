// Sizes of results, for ops that libtorch knows on the meta device in Python only.

#include "fsdp/touch.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

namespace fsdp2::fsdp {
namespace {

using at::Tensor;

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[c10::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor embedding_dense_backward(const Tensor& gradient, const Tensor&, int64_t rows, int64_t,
                                bool) {
  return at::empty({rows, gradient.size(-1)}, gradient.options());
}

std::vector<int64_t> where_sizes(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return at::infer_size(at::infer_size(self.sizes(), other.sizes()), condition.sizes());
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return at::empty(where_sizes(condition, self, other),
                   self.options().dtype(at::result_type(self, other)).device(c10::kMeta));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  out.resize_(where_sizes(condition, self, other));
  return out;
}

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors native_layer_norm(const Tensor& input, at::IntArrayRef normalized,
                               const std::optional<Tensor>&, const std::optional<Tensor>&, double) {
  std::vector<int64_t> sizes = input.sizes().vec();
  for (size_t i = sizes.size() - normalized.size(); i < sizes.size(); ++i) sizes[i] = 1;
  const auto statistics = input.options().dtype(at::toOpMathType(input.scalar_type()));
  return {at::empty(input.sizes(), input.options()), at::empty(sizes, statistics),
          at::empty(sizes, statistics)};
}

ThreeTensors native_layer_norm_backward(const Tensor&, const Tensor& input, at::IntArrayRef,
                                        const Tensor&, const Tensor&,
                                        const std::optional<Tensor>& weight,
                                        const std::optional<Tensor>& bias,
                                        std::array<bool, 3> wanted) {
  return {wanted[0] ? at::empty_like(input) : Tensor(),
          wanted[1] && weight ? at::empty_like(*weight) : Tensor(),
          wanted[2] && bias ? at::empty_like(*bias) : Tensor()};
}

}  // namespace

void register_meta_kernels() {
  static auto* library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__,
                                    __LINE__);
    const auto add = [&](const char* name, auto* kernel) {
      const std::string full = std::string("aten::") + name;
      const size_t dot = full.find('.');
      const c10::OperatorName op(full.substr(0, dot),
                                 dot == std::string::npos ? "" : full.substr(dot + 1));
      const auto found = c10::Dispatcher::singleton().findOp(op);
      if (found && !found->hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
        made->impl(name, kernel);
      }
    };
    add("index_select", &index_select);
    add("embedding_dense_backward", &embedding_dense_backward);
    add("where.self", &where);
    add("where.self_out", &where_out);
    add("native_layer_norm", &native_layer_norm);
    add("native_layer_norm_backward", &native_layer_norm_backward);
    return made;
  }();
  (void)library;
}

}  // namespace fsdp2::fsdp
