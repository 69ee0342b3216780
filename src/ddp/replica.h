#pragma once

// A replicated module in backward.

#include "ddp/reducer.h"

#include <fsdp2/device_mesh.h>
#include <fsdp2/replicate.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::ddp {

struct Plan;

class Replica final : public std::enable_shared_from_this<Replica> {
 public:
  Replica(const Plan& plan, const ProcessGroup& group, const ReplicateOptions& options);

  /// Puts hooks on the parameters. They know the replica weakly.
  void watch_parameters();
  void sync_buffers() const;
  bool module_is_alive() const { return !module_.expired(); }

  bool requires_gradient_sync = true;

 private:
  void gradient_ready(size_t index);
  /// Another gradient of the parameter in this backward: whether it is the last one, and can be
  /// reduced now.
  bool arrives(size_t index);
  void mark(size_t index);
  /// Error if the parameter has been replaced under our hooks.
  void check_parameter(size_t index) const;
  void begin_backward();
  void end_backward();
  void abandon_backward();
  /// What the first backward fixed and this one lacks; "" if nothing.
  std::string missing_of_static_graph() const;
  void check_counts() const;
  std::string rank_text() const;

  const std::weak_ptr<torch::nn::Module> module_;
  const std::vector<torch::Tensor> parameters_;
  const std::vector<std::string> names_;
  const ProcessGroup group_;
  const bool find_unused_parameters_, static_graph_, broadcast_buffers_;
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> accumulators_;

  std::mutex mutex_;  // guards what follows
  const std::unique_ptr<Reducer> reducer_;
  int64_t backwards_ = 0;      // begun so far
  int64_t backward_ = 0;       // the one that is running; 0: none
  std::vector<int> arrivals_;  // gradients so far, of each parameter
  std::vector<bool> marked_;
  size_t missing_ = 0;          // parameters that may still come
  std::optional<size_t> last_;  // the last one to come, not yet marked
  std::vector<int> graph_;      // arrivals_ of the first backward, of a static graph
};

/// Values of the group's rank 0 on all ranks. Collective.
void broadcast_values(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group);

}  // namespace fsdp2::ddp
