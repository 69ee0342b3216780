#pragma once

#include "train/llama.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::train {

struct SampleOptions {
  int64_t tokens = 200;      // at most
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top_k = 0;         // 0: all
  uint64_t seed = 1234;
};

/// Continues `prompt`, which is not empty. Calls `emit` with each token, and ends after it if that
/// returns false. Only tokens below `choices` are made; 0: all. Returns what was made.
std::vector<int64_t> generate_tokens(Llama& model, const std::vector<int64_t>& prompt,
                                     const SampleOptions& options,
                                     const std::function<bool(int64_t)>& emit = {},
                                     int64_t choices = 0);

/// Continues `prompt` (bytes; empty: the start of a document) until `tokens` are made or the
/// document ends, and calls `emit` with each byte. Returns what was made.
std::string generate(Llama& model, std::string_view prompt, const SampleOptions& options,
                     const std::function<void(char)>& emit = {});

}  // namespace fsdp2::train
