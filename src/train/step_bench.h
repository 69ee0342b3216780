#pragma once

// `fsdp2 bench step`: trains the decoder on synthetic tokens for a few steps and reports losses,
// gradient norms, times, memory and collectives, sharded or in one process, so that two runs can be
// held against each other.

#include "train/llama.h"
#include "train/sharding.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace fsdp2::train {

struct StepBenchOptions {
  std::string mode = "fsdp2";  // ddp: replicated; local: one process, nothing sharded
  std::string preset = "tiny";
  LlamaConfig model;  // resolved
  int64_t batch = 4;  // a rank
  int64_t steps = 10, warmup = 2;
  double lr = 1e-3;
  uint64_t seed = 1234;
  int64_t accum = 1;
  double clip = 0;                  // 0: the norm only
  std::string norm_impl = "torch";  // torch and fast: clip_grad_norm_; fp64: in double; off
  ShardingOptions sharding;         // of mode fsdp2
  int64_t local_world = 1;          // local mode: the batches of this many ranks, concatenated
  bool local_replicas = false;      // local mode on several ranks: each trains its own copy
  int threads = 1;
  std::string load_init, dump_init, dump_final;  // safetensors files
  int64_t start_step = 0;
  std::string trace;  // as StepTrace takes it: of the first steps after warm-up; empty: none
};

/// Collective over the world that the environment describes. The report on rank 0, nothing on the
/// others.
std::optional<nlohmann::ordered_json> run_step_bench(const StepBenchOptions& options);

}  // namespace fsdp2::train
