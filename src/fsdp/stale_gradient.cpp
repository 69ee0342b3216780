#include "fsdp/stale_gradient.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp2::fsdp {
namespace {

struct StaleGradientStorage final : c10::StorageImpl {
  StaleGradientStorage(const std::string& name, int64_t nbytes, c10::Device device)
      : c10::StorageImpl(use_byte_size_t(), c10::SymInt(nbytes), c10::DataPtr(nullptr, device),
                         c10::GetAllocator(device.type()), /*resizable=*/false) {
    release_data_and_set_meta_custom_data_ptr_error_msg_(
        "this handle of parameter '" + name +
        "' is the module's own tensor, whose gradient went to the shard. An optimizer (or "
        "clipping) "
        "must be given module->parameters() as they are after fully_shard.");
  }
};

/// Runs before a gradient is accumulated into a member.
struct ClearStaleGradient final : torch::autograd::FunctionPreHook {
  explicit ClearStaleGradient(WeakTensor member) : member(std::move(member)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (auto impl = member.lock()) {
      const torch::Tensor tensor(std::move(impl));
      if (is_stale(tensor.grad())) tensor.mutable_grad().reset();
    }
    return gradients;
  }
  WeakTensor member;
};

}  // namespace

torch::Tensor stale_gradient(const ParamLayout& layout, c10::Device device) {
  c10::intrusive_ptr<c10::StorageImpl> storage =
      c10::make_intrusive<StaleGradientStorage>(layout.name, layout.nbytes(), device);
  torch::Tensor gradient = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(c10::computeDispatchKey(layout.dtype, c10::Layout::Strided, device)),
      caffe2::TypeMeta::fromScalarType(layout.dtype));
  gradient.unsafeGetTensorImpl()->set_sizes_contiguous(layout.sizes);
  return gradient;
}

bool is_stale(const torch::Tensor& gradient) {
  return gradient.defined() && gradient.has_storage() &&
         dynamic_cast<StaleGradientStorage*>(gradient.storage().unsafeGetStorageImpl());
}

void clear_stale_gradient_before_accumulation(const torch::Tensor& member) {
  torch::autograd::impl::add_hook(
      member, std::make_unique<ClearStaleGradient>(WeakTensor(member.getIntrusivePtr())));
}

}  // namespace fsdp2::fsdp
