#pragma once

// How `fsdp2 train` and `fsdp2 bench step` shard their model: what fully_shard and its controls can
// be told, as options of a command.

#include "train/llama.h"

#include <fsdp2/fully_shard.h>

#include <nlohmann/json.hpp>
#include <string>

namespace fsdp2::train {

struct ShardingOptions {
  int64_t replicate = 1;  // copies of the model (HSDP); divides the number of ranks
  bool reshard_after_forward = true;
  int64_t reshard_to = 0;  // ranks that share a block between forward and backward; 0: all
  int64_t shard_dim = 0;   // of the parameters that have it and divide evenly; others: 0
  bool offload = false;
  std::string ignore;  // parameters whose names end so are left to each rank
  std::string param_dtype = "fp32", reduce_dtype = "fp32";
  bool cast_forward_inputs = true;
  std::string output_dtype;  // of what the model returns when called by boundary(); "": as it comes
  // With several micro-batches a step: in which of them gradients are reduced, and over the copies;
  // whether the last is told; whether the parameters are freed after the backward of any but it.
  std::string sync = "every", all_reduce = "every";  // or last
  bool is_last_backward = false;
  bool reshard_after_backward = true;
};

/// Error naming the option if one makes no sense for this many ranks.
void check(const ShardingOptions& options, int64_t ranks);

/// One group a block, and the rest as the root's, which is not freed after forward.
void shard(Llama& model, const ShardingOptions& options);

/// The sharded model, to be called with its boundary around it.
Sharded<LlamaImpl> boundary(Llama& model);

/// To be called before the forward of micro-batch `index` of `count`.
void before_micro_batch(Llama& model, const ShardingOptions& options, int64_t index, int64_t count);

nlohmann::ordered_json to_json(const ShardingOptions& options);

}  // namespace fsdp2::train
