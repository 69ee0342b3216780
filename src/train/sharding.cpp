#include "train/sharding.h"

#include "train/world.h"

#include <torch/torch.h>

namespace fsdp2::train {
namespace {

DeviceMesh mesh_of(const ShardingOptions& options) {
  const std::string device = get_device().is_cuda() ? "cuda" : "cpu";
  const int64_t ranks = get_world_size();
  if (options.replicate == 1) return init_device_mesh(device, {ranks});
  return init_device_mesh(device, {options.replicate, ranks / options.replicate},
                          {"replicate", "shard"});
}

}  // namespace

void check(const ShardingOptions& options, int64_t ranks) {
  TORCH_CHECK_VALUE(options.replicate >= 1 && ranks % options.replicate == 0, "--replicate ",
                    options.replicate, " does not divide the number of ranks, ", ranks);
  TORCH_CHECK_VALUE(options.sync == "every" || options.sync == "last",
                    "--sync is 'every' or 'last', got '", options.sync, "'");
}

void shard(Llama& model, const ShardingOptions& options) {
  FullyShardOptions blocks;
  blocks.mesh = mesh_of(options);
  blocks.reshard_after_forward = options.reshard_after_forward;
  blocks.mp_policy = precision(options.param_dtype, options.reduce_dtype);
  blocks.mp_policy.cast_forward_inputs = options.cast_forward_inputs;
  FullyShardOptions root = blocks;
  root.reshard_after_forward = false;
  for (const auto& block : *model->layers) fully_shard(block, blocks);
  fully_shard(model, root);
}

void before_micro_batch(Llama& model, const ShardingOptions& options, int64_t index,
                        int64_t count) {
  const bool last = index == count - 1;
  FSDPModule root = as_fsdp(*model);
  if (options.sync == "last") root.set_requires_gradient_sync(last);
  if (!options.reshard_after_backward) root.set_reshard_after_backward(last);
}

nlohmann::ordered_json to_json(const ShardingOptions& options) {
  return {{"replicate", options.replicate},
          {"reshard_after_forward", options.reshard_after_forward},
          {"param_dtype", options.param_dtype},
          {"reduce_dtype", options.reduce_dtype},
          {"cast_forward_inputs", options.cast_forward_inputs},
          {"sync", options.sync},
          {"reshard_after_backward", options.reshard_after_backward}};
}

}  // namespace fsdp2::train
