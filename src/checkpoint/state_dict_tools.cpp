#include "checkpoint/state_dict_tools.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

namespace fsdp2::dcp {
namespace {

torch::Tensor finished(const torch::Tensor& tensor, const StateDictOptions& options, bool keep) {
  torch::Tensor result = tensor.detach();
  if (is_dtensor(result)) {
    const DTensor sharded(result);
    if (options.full_state_dict) {
      result = sharded.full_tensor();
    } else if (options.cpu_offload && !sharded.to_local().is_cpu()) {
      result = DTensor::from_local(sharded.to_local().cpu(), sharded.device_mesh(),
                                   sharded.placements(), sharded.sizes().vec());
    }
  }
  if (!keep) return {};
  return options.cpu_offload && !is_dtensor(result) ? result.cpu() : result;
}

void finish(Value& value, const StateDictOptions& options, bool keep) {
  if (value.is_tensor()) {
    value = finished(value.to_tensor(), options, keep);
  } else if (value.is_dict()) {
    for (auto& [key, item] : value.dict()) finish(item, options, keep);
  }
}

}  // namespace

StateDict finished(StateDict state, const StateDictOptions& options) {
  if (!options.full_state_dict && !options.cpu_offload) return state;
  torch::NoGradGuard no_grad;
  const bool keep = !options.full_state_dict || !options.cpu_offload || get_rank() == 0;
  for (auto& [key, value] : state) finish(value, options, keep);
  return keep ? state : StateDict();
}

torch::Tensor from_rank_0(const torch::Tensor& tensor, torch::ScalarType dtype,
                          const std::vector<int64_t>& sizes) {
  const torch::Tensor here =
      get_rank() == 0 ? tensor.detach().to(get_device()).contiguous()
                      : torch::empty(sizes, torch::TensorOptions(dtype).device(get_device()));
  if (get_world_size() > 1) wait(broadcast(here, 0, world_group()), "a state dict of rank 0");
  return here;
}

std::unordered_map<const void*, std::string> names_of(const torch::nn::Module& model) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : model.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  return names;
}

void check_options(const StateDictOptions& options) {
  TORCH_CHECK_VALUE(!options.broadcast_from_rank0 || options.full_state_dict,
                    "broadcast_from_rank0 sends whole tensors: set full_state_dict too");
  TORCH_CHECK_VALUE(options.keep_submodule_prefixes || options.submodules.size() <= 1,
                    "without their prefixes only one submodule's names are unambiguous, got ",
                    options.submodules.size());
}

}  // namespace fsdp2::dcp
