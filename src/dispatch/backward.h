#pragma once

#include <torch/csrc/autograd/engine.h>

namespace fsdp2::dispatch {

/// Whether this thread runs a backward pass.
inline bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace fsdp2::dispatch
