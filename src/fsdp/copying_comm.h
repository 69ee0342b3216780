#pragma once

// The GroupComm that copies: shards into one buffer, an all-gather, and out of it again; gradients
// into one buffer, a reduce-scatter, and out of it.

#include "fsdp/group_comm.h"
#include "fsdp/host_group.h"

#include <fsdp2/collectives.h>

#include <map>

namespace fsdp2::fsdp {

/// What all gathers and reductions of one group need.
struct CommContext {
  std::vector<ParamLayout> layouts;
  ProcessGroup gather_group;
  ProcessGroup reduce_group;
  ProcessGroup replicate_group;  // null without replicas
  c10::Device device = c10::kCPU;
  int64_t world = 1;  // ranks that share one copy
  int64_t rank = 0;   // among these
  int64_t replicas = 1;
  bool extended = false;            // some layout has an extension
  std::shared_ptr<HostGroup> host;  // null: what is gathered and reduced travels
  /// Of the replicas, where each is a single rank. Null: their sums travel.
  std::shared_ptr<HostGroup> replicas_host;

  /// Where gradients are added up in shared memory; null: they travel. `all`: over replicas too.
  comm::SharedReductions* shared_reductions(bool all) const;

  /// Memory of one whole parameter as a tensor.
  torch::Tensor whole(void* data, size_t param) const;
};

using CommContextPtr = std::shared_ptr<const CommContext>;

/// The output of a group's last reduction in each dtype, whose parts are gradients until the user
/// lets go of them. Used again then: fresh memory costs more than the sum that goes there.
class ReduceOutputs {
 public:
  torch::Tensor get(int64_t numel, const at::TensorOptions& options);

 private:
  std::map<torch::ScalarType, torch::Tensor> last_;
};

std::unique_ptr<Gather> start_copying_gather(CommContextPtr context,
                                             std::shared_ptr<AllGather> custom,
                                             const std::vector<torch::Tensor>& shards,
                                             const GatherWords& words);
std::unique_ptr<Reduce> start_copying_reduce(CommContextPtr context,
                                             std::shared_ptr<ReduceScatter> custom,
                                             const std::vector<ReduceInput>& inputs,
                                             const ReduceOptions& options,
                                             std::unique_ptr<ReduceStage> stage,
                                             ReduceOutputs& outputs);
/// Null where parameters' gradients are not shared, or somebody would have to be waited for.
std::unique_ptr<ReduceStage> stage_shared_reduce(const CommContextPtr& context,
                                                 std::vector<size_t> params,
                                                 torch::ScalarType dtype,
                                                 std::function<void()> taken);

/// Bytes of a reduction of all parameters at once, at most: on all ranks the same.
size_t largest_reduction(const CommContext& context);

inline int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace fsdp2::fsdp
