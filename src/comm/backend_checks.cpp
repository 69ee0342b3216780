#include "comm/backend_checks.h"

#include "comm/reduce.h"

#include <c10/util/Exception.h>

namespace fsdp2::comm {

void BackendChecks::tensor(const at::Tensor& tensor, const char* name) const {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                  tensor.has_storage(),
              backend_, ": ", name, " in group '", group_, "': backend '", backend_,
              "' takes dense CPU tensors");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), backend_, ": ", name,
              " in group '", group_, "': a tensor of sizes ", tensor.sizes(), " and strides ",
              tensor.strides(), " is not contiguous: pass contiguous()");
}

void BackendChecks::one_tensor(const std::vector<at::Tensor>& tensors, const char* name) const {
  TORCH_CHECK(tensors.size() == 1, backend_, ": ", name, " takes one tensor a rank, not ",
              tensors.size());
  tensor(tensors[0], name);
}

void BackendChecks::same_type(const at::Tensor& a, const at::Tensor& b, const char* name) const {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), backend_, ": ", name, " in group '", group_,
              "': tensors of ", a.scalar_type(), " and ", b.scalar_type());
}

void BackendChecks::reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  const std::string why = why_not_reducible(tensor.scalar_type(), op.op_);
  TORCH_CHECK(why.empty(), backend_, ": ", why);
}

}  // namespace fsdp2::comm
