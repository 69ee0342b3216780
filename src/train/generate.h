#pragma once

#include "train/llama.h"

#include <functional>
#include <string>
#include <string_view>

namespace fsdp2::train {

struct SampleOptions {
  int64_t tokens = 200;
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top_k = 0;         // 0: all
  uint64_t seed = 1234;
};

/// Continues `prompt` (bytes; empty: the start of a document) until `tokens` are made or the
/// document ends, and calls `emit` with each byte. Returns what was made.
std::string generate(Llama& model, std::string_view prompt, const SampleOptions& options,
                     const std::function<void(char)>& emit = {});

}  // namespace fsdp2::train
