#include "cli/model_options.h"

#include "train/llama.h"
#include "train/sharding.h"

namespace fsdp2::cli {

void add_model_options(CLI::App& command, train::LlamaConfig& model) {
  command.add_option("--dim", model.dim, "Width");
  command.add_option("--layers", model.layers, "Blocks");
  command.add_option("--heads", model.heads, "Attention heads");
  command.add_option("--kv-heads", model.kv_heads, "Key and value heads; default: as --heads");
  command.add_option("--ffn", model.ffn,
                     "Feed-forward width; default: 8/3 of --dim, rounded up to 64");
  command.add_option("--seq", model.seq, "Tokens a sequence");
  command.add_flag("--tied", model.tied, "Use the embedding as output head");
}

void add_precision_options(CLI::App& command, std::string& param_dtype, std::string& reduce_dtype) {
  const auto dtypes = CLI::IsMember({"fp32", "bf16", "fp16"});
  command.add_option("--param-dtype", param_dtype, "Compute and gather in this; weights stay fp32")
      ->check(dtypes)
      ->capture_default_str();
  command.add_option("--reduce-dtype", reduce_dtype, "Reduce gradients in this")
      ->check(dtypes)
      ->capture_default_str();
}

void add_sharding_options(CLI::App& command, train::ShardingOptions& sharding) {
  command
      .add_option("--replicate", sharding.replicate,
                  "Copies of the model, each sharded over its part of the ranks (HSDP)")
      ->capture_default_str();
  command
      .add_option("--reshard-after-forward", sharding.reshard_after_forward,
                  "Free blocks after forward")
      ->capture_default_str();
  command
      .add_option("--reshard-to", sharding.reshard_to,
                  "Ranks that share a block between forward and backward, a factor of all; 0: all")
      ->capture_default_str();
  command
      .add_option("--shard-dim", sharding.shard_dim,
                  "Dimension to shard, of the parameters whose size there divides")
      ->capture_default_str();
  command.add_option("--offload", sharding.offload, "Keep shards and optimizer in host memory")
      ->capture_default_str();
  command.add_option("--ignore", sharding.ignore,
                     "Parameters whose names end so stay whole, and each rank's own");
  add_precision_options(command, sharding.param_dtype, sharding.reduce_dtype);
  command
      .add_option("--cast-forward-inputs", sharding.cast_forward_inputs,
                  "Cast what meets a parameter to its dtype; false: refuse it")
      ->capture_default_str();
  command.add_option("--sync", sharding.sync, "Reduce gradients in every micro-batch, or the last")
      ->check(CLI::IsMember({"every", "last"}))
      ->capture_default_str();
  command
      .add_option("--all-reduce", sharding.all_reduce,
                  "Sum over the copies in every micro-batch, or the last")
      ->check(CLI::IsMember({"every", "last"}))
      ->capture_default_str();
  command
      .add_option("--is-last-backward", sharding.is_last_backward,
                  "Say which micro-batch is the last (changes nothing)")
      ->capture_default_str();
  command
      .add_option("--reshard-after-backward", sharding.reshard_after_backward,
                  "Free parameters between micro-batches")
      ->capture_default_str();
}

void take_model_preset(const CLI::App& command, train::LlamaConfig& model,
                       const train::LlamaConfig& preset) {
  take_preset(command, "--dim", model.dim, preset.dim);
  take_preset(command, "--layers", model.layers, preset.layers);
  take_preset(command, "--heads", model.heads, preset.heads);
  take_preset(command, "--seq", model.seq, preset.seq);
}

}  // namespace fsdp2::cli
