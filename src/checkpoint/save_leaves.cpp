#include "checkpoint/archive.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/save_plan.h"

#include <fsdp2/dtensor.h>

#include <algorithm>

namespace fsdp2::dcp {
namespace {

/// Stateful objects give way to their state.
void resolve(Value& value) {
  if (value.is<std::shared_ptr<Stateful>>()) {
    value = std::get<std::shared_ptr<Stateful>>(value.variant())->state_dict();
  }
  if (!value.is_dict()) return;
  for (auto& [key, item] : value.dict()) resolve(item);
}

void check_mesh(const torch::Tensor& tensor, const Exchange& exchange) {
  for (const int rank : DTensor(tensor).device_mesh().ranks()) {
    TORCH_CHECK_VALUE(
        std::count(exchange.ranks().begin(), exchange.ranks().end(), rank) > 0,
        "it lies on ranks outside of the process group that saves (rank ", rank,
        " for one): pass a group that has all ranks of its mesh, or none for the world's");
  }
}

SaveLeaf tensor_leaf(const torch::Tensor& tensor, const Exchange& exchange) {
  SaveLeaf leaf;
  TORCH_CHECK_VALUE(tensor.defined(), "the tensor is undefined");
  TORCH_CHECK_VALUE(tensor.layout() == torch::kStrided && !tensor.is_quantized(),
                    "only dense tensors can be saved, not ", tensor.layout(), " ",
                    tensor.scalar_type());
  dtype_name(tensor.scalar_type());
  leaf.sharded = is_dtensor(tensor);
  if (leaf.sharded) check_mesh(tensor, exchange);
  leaf.block = block_of(tensor);
  leaf.data = data_of(tensor);
  // A wrapped module's own parameter gathers itself when it is read, which is for this thread only.
  if (!is_plain(leaf.data)) leaf.data = leaf.data.clone();
  TORCH_CHECK_VALUE(!leaf.data.is_meta(),
                    "it is on the meta device, without values: to_empty() and initialise first");
  leaf.dtype = tensor.scalar_type();
  leaf.sizes = tensor.sizes().vec();
  return leaf;
}

}  // namespace

uint64_t SaveLeaf::bytes() const {
  return is_tensor() ? static_cast<uint64_t>(data.nbytes()) : archive.size();
}

std::vector<SaveLeaf> save_leaves(const StateDict& state, const Exchange& exchange) {
  torch::NoGradGuard no_grad;
  Value root(state);
  resolve(root);
  std::vector<SaveLeaf> leaves;
  for (const Leaf& from : flatten(root.dict())) {
    SaveLeaf leaf;
    try {
      if (from.value->is_tensor()) {
        leaf = tensor_leaf(from.value->to_tensor(), exchange);
      } else {
        write_object(*from.value, [&](const void* data, size_t size) {
          leaf.archive.append(static_cast<const char*>(data), size);
        });
      }
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, from.key, ": ", error.what_without_backtrace());
    }
    leaf.key = from.key;
    leaf.path = from.path;
    leaves.push_back(std::move(leaf));
  }
  return leaves;
}

}  // namespace fsdp2::dcp
