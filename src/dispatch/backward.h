#pragma once

#include <torch/csrc/autograd/engine.h>

#include <functional>

namespace fsdp2::dispatch {

/// Whether this thread runs a backward pass.
inline bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// To be called inside of a backward: runs `ended` when the outermost one has ended. If that never
/// comes, because backward fails, or if `ended` throws, `failed` runs instead; it may not throw.
void at_end_of_backward(std::function<void()> ended, std::function<void()> failed);

}  // namespace fsdp2::dispatch
