// Tensor::set_data and Module::clone: who may take the data of whom.

#include "dtensor/rules.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

namespace fsdp2::dtensor {
namespace {

/// Asked by set_data before DTensorImpl::shallow_copy_from. Has no kernel to stand in for, so that
/// interception does not see it.
bool takes_data_of(const at::Tensor& self, const at::Tensor& from) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_dtensor(self), "a plain tensor cannot take the data of a DTensor of size ", from.sizes(),
      " laid out as ", to_string(spec_of(from)->placements),
      " (set_data, or Module::clone() of a module with sharded parameters): take the whole tensor "
      "with full_tensor(), or make the module anew and copy_() its values");
  TORCH_CHECK_VALUE(self.sizes() == from.sizes() || is_dtensor(from),
                    "set_data on a DTensor of size ", self.sizes(), " from a plain tensor of size ",
                    from.sizes(),
                    ": give the whole values, or wrap this rank's part with DTensor::from_local");
  return true;
}

}  // namespace

void register_set_data() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse2, __FILE__,
                         __LINE__);  // for the life of the process
  library->impl("_has_compatible_shallow_copy_type", &takes_data_of);
}

}  // namespace fsdp2::dtensor
