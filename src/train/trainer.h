#pragma once

// `fsdp2 train`: trains the decoder on text or token ids, sharded over all ranks.

#include "train/data.h"
#include "train/llama.h"
#include "train/schedule.h"
#include "train/sharding.h"
#include "train/world.h"

#include <string>

namespace fsdp2::train {

/// Steps that are over before a trace begins.
constexpr int64_t kTraceFrom = 2;

struct TrainOptions {
  LlamaConfig model;  // resolved; not looked at with `from`
  std::string from;   // folder of a model to start from; empty: new weights
  int64_t seq = 0;    // tokens a window; 0: as many as the model takes
  DataOptions data;   // its seq, vocab and seed follow from the fields here
  int64_t batch = 8;  // windows a rank and micro-batch
  int64_t accum = 1;  // micro-batches a step
  Schedule schedule;
  double weight_decay = 0.1;  // of matrices; norm weights have none
  double clip = 1.0;          // largest gradient norm; 0: no clipping
  uint64_t seed = 1234;
  ShardingOptions sharding;
  int64_t val_every = 0;    // steps; 0: only at the end
  int64_t val_batches = 8;  // of the size of a training batch on all ranks
  int64_t log_every = 10;
  std::string out;  // folder for the model; empty: not saved
  torch::ScalarType out_dtype = torch::kFloat32;
  std::string metrics;  // file; empty: none
  std::string trace;    // as StepTrace takes it: of steps kTraceFrom + 1 and on; empty: none
};

struct TrainResult {
  int64_t steps = 0;
  int signal = 0;              // that stopped the run early, or 0
  double validation_loss = 0;  // nats a token; not measured when stopped early
};

/// Collective. Errors in the options, data and folders are raised on all ranks before training
/// starts; a loss that is not finite, at its step. SIGTERM or SIGINT on any rank stops all ranks
/// after the same step; the model is saved.
TrainResult train(const TrainOptions& options, const World& world);

}  // namespace fsdp2::train
