#pragma once

// What a call of replicate is going to do, and that the ranks agree on it.

#include <fsdp2/device_mesh.h>
#include <fsdp2/replicate.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp2::ddp {

struct Plan {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<torch::Tensor> trained;  // require grad; a tied parameter once
  std::vector<std::string> trained_names;
  std::vector<torch::Tensor> values;  // what rank 0 sends: parameters and buffers
};

/// Changes nothing. Collective over the mesh; an error on one rank is an error on all.
Plan make_plan(const std::shared_ptr<torch::nn::Module>& module, const DeviceMesh& mesh,
               const ReplicateOptions& options);

}  // namespace fsdp2::ddp
