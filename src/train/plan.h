#pragma once

// How much memory a rank will need to train the decoder, worked out from sizes alone: nothing is
// allocated and nobody is asked. The groups are those of shard() in sharding.h: one a block, and
// the rest as the root's.

#include "train/llama.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fsdp2::train {

struct PlanOptions {
  LlamaConfig model;                 // resolved
  int64_t replicate = 1, shard = 1;  // the mesh; their product is the number of ranks
  int64_t batch = 1;                 // sequences a rank and micro-batch
  std::string param_dtype = "fp32", reduce_dtype = "fp32";
  std::string optimizer = "adamw";  // or adam, momentum, sgd
  bool reshard_after_forward = true;
  int64_t reshard_to = 0;        // ranks that share a block between forward and backward; 0: all
  bool checkpoint = false;       // blocks run again in backward
  bool offload = false;          // shards, their gradients and the optimizer's state in host memory
  bool nvme_moments = false;     // the optimizer's state in files (optim::AdamW)
  std::string backend = "gloo";  // which reduces a copy of what it is given; or nccl
};

/// Bytes that are alive at one moment of a step, on the rank that holds the most.
struct Moment {
  std::string name;
  /// Of moments in files, the pages that are in use and read ahead.
  int64_t shards = 0, gradients = 0, optimizer = 0;
  /// Whole parameters, and the buffers of the gather that is on its way.
  int64_t gathered = 0, gather_buffers = 0;
  /// What reshard_to leaves of blocks between their forward and their backward.
  int64_t kept_parts = 0;
  /// Whole gradients, and the buffers of the reduction that is on its way.
  int64_t whole_gradients = 0, reduce_buffers = 0;
  /// An estimate: what the decoder's ops save for backward, and the largest temporaries.
  int64_t activations = 0;

  int64_t total() const;
  /// Of it, what is in host memory if there is offload.
  int64_t sharded() const { return shards + gradients + optimizer; }
};

struct MemoryPlan {
  int64_t parameters = 0;        // of the whole model
  int64_t shard_parameters = 0;  // of the largest rank
  int64_t largest_group = 0;     // parameters
  std::vector<Moment> moments;   // in the order of a step

  const Moment& peak() const;
};

/// Error naming the option if one makes no sense.
void check(const PlanOptions& options);
MemoryPlan plan_memory(const PlanOptions& options);

/// A table for people.
std::string plan_table(const PlanOptions& options, const MemoryPlan& plan);
nlohmann::ordered_json plan_json(const PlanOptions& options, const MemoryPlan& plan);

}  // namespace fsdp2::train
