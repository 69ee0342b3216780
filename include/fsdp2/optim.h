#pragma once

// Optimizers whose step is one fused kernel over this rank's parts. Follows torch.optim.AdamW with
// fused=True (pytorch.org/docs/stable/generated/torch.optim.AdamW.html).

#include <fsdp2/nvme_offload.h>

#include <torch/optim/adamw.h>

#include <memory>
#include <optional>
#include <vector>

namespace fsdp2 {
class GradScaler;
}

namespace fsdp2::optim {

struct AdamWExtras {
  /// Go up the gradient.
  bool maximize = false;
  /// Keep the moments in memory-mapped files: the next parameter's are read ahead while one is
  /// updated, and written back after it, so that no more than a few parameters' moments are in
  /// memory at a time. The numbers are those in memory, bit for bit. For parameters on the CPU.
  /// Errors that name the file: from the constructor if it cannot be made, from step(), before
  /// anything changes, if the disk is full.
  std::optional<NvmeOffloadPolicy> nvme_offload = std::nullopt;
};

class MomentFile;

/// Takes the place of torch::optim::AdamW: the same options, groups and state, and numbers that
/// differ from its by rounding. Parameters may be plain and DTensors of any mesh and dtype, mixed;
/// step() is local, however they are sharded, and moments lie as their parameter does. One without
/// gradient is left alone. Errors, before anything changes, naming group and position: a sparse
/// gradient, or one of another layout or mesh than its parameter; a part with gaps in memory.
class AdamW : public torch::optim::AdamW {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 const torch::optim::AdamWOptions& defaults = {}, AdamWExtras extras = {});
  explicit AdamW(std::vector<torch::Tensor> parameters,
                 const torch::optim::AdamWOptions& defaults = {}, AdamWExtras extras = {});

  /// The closure, if given, runs with gradients enabled and its loss is returned.
  torch::Tensor step(LossClosure closure = nullptr) override;

  bool maximize() const { return extras_.maximize; }

 private:
  friend class fsdp2::GradScaler;
  torch::optim::AdamWParamState& state_of(const torch::Tensor& parameter, bool amsgrad);
  void step_through_file(torch::optim::OptimizerParamGroup& group);

  AdamWExtras extras_;
  std::optional<double> grad_scale_;  // step() divides gradients by it
  std::shared_ptr<MomentFile> file_;  // of the moments, if they are offloaded
};

}  // namespace fsdp2::optim
