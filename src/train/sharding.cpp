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
  TORCH_CHECK_VALUE(options.reshard_to >= 0, "--reshard-to must not be negative, got ",
                    options.reshard_to);
  TORCH_CHECK_VALUE(options.shard_dim >= 0, "--shard-dim must not be negative, got ",
                    options.shard_dim);
}

void shard(Llama& model, const ShardingOptions& options) {
  FullyShardOptions blocks;
  blocks.mesh = mesh_of(options);
  blocks.reshard_after_forward = options.reshard_after_forward;
  blocks.mp_policy = precision(options.param_dtype, options.reduce_dtype);
  blocks.mp_policy.cast_forward_inputs = options.cast_forward_inputs;
  if (options.reshard_to > 0) blocks.reshard_after_forward = options.reshard_to;
  if (options.offload) blocks.offload_policy = CPUOffloadPolicy{};
  if (options.shard_dim > 0) {
    const int64_t shards = blocks.mesh.size(-1);
    blocks.shard_placement_fn =
        [dim = options.shard_dim,
         shards](const torch::Tensor& parameter) -> std::optional<ShardPlacement> {
      if (parameter.dim() <= dim || parameter.size(dim) % shards != 0) return std::nullopt;
      return Shard(dim);
    };
  }
  for (const auto& item : model->named_parameters()) {
    if (!options.ignore.empty() && item.key().ends_with(options.ignore))
      blocks.ignored_params.push_back(item.value());
  }
  FullyShardOptions root = blocks;
  root.reshard_after_forward = false;
  if (!options.output_dtype.empty()) root.mp_policy.output_dtype = dtype_of(options.output_dtype);
  for (const auto& block : *model->layers) fully_shard(block, blocks);
  fully_shard(model, root);
}

Sharded<LlamaImpl> boundary(Llama& model) { return {as_fsdp(*model), model.ptr()}; }

void before_micro_batch(Llama& model, const ShardingOptions& options, int64_t index,
                        int64_t count) {
  const bool last = index == count - 1;
  FSDPModule root = as_fsdp(*model);
  if (options.sync == "last") root.set_requires_gradient_sync(last);
  if (options.all_reduce == "last") root.set_requires_all_reduce(last);
  if (options.is_last_backward) root.set_is_last_backward(last);
  if (!options.reshard_after_backward) root.set_reshard_after_backward(last);
}

nlohmann::ordered_json to_json(const ShardingOptions& options) {
  return {{"replicate", options.replicate},
          {"reshard_after_forward", options.reshard_after_forward},
          {"reshard_to", options.reshard_to},
          {"shard_dim", options.shard_dim},
          {"offload", options.offload},
          {"ignore", options.ignore},
          {"param_dtype", options.param_dtype},
          {"reduce_dtype", options.reduce_dtype},
          {"cast_forward_inputs", options.cast_forward_inputs},
          {"output_dtype", options.output_dtype},
          {"sync", options.sync},
          {"all_reduce", options.all_reduce},
          {"is_last_backward", options.is_last_backward},
          {"reshard_after_backward", options.reshard_after_backward}};
}

}  // namespace fsdp2::train
