#pragma once

// One parameter group: what fully_shard made of one call. Holds the shards, knows the whole
// parameters weakly, and moves bytes between the two. When it does so is the schedule's business.

#include "dtensor/dtensor_impl.h"
#include "fsdp/gathered_storage.h"
#include "fsdp/group_comm.h"

#include <fsdp2/device_mesh.h>
#include <fsdp2/mixed_precision.h>

#include <torch/nn/module.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp2::fsdp {

class Schedule;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// What fully_shard was told of the parameters of one group.
struct GroupPolicy {
  MixedPrecisionPolicy mp;
  /// Where shards, their gradients and hence the optimizer's state live.
  c10::Device shard_device = c10::kCPU;
  bool pin_memory = false;
};

/// A parameter to shard, and how.
struct ParamSpec {
  torch::Tensor tensor;
  std::string name;
  std::optional<int64_t> shard_dim{};
  std::shared_ptr<AllGatherExtension> extension{};
};

struct Param {
  ParamLayout layout;  // of the gathered parameter, its dtype included
  torch::ScalarType shard_dtype = torch::kFloat;
  torch::ScalarType reduce_dtype = torch::kFloat;
  /// What the registry holds: a DTensor.
  torch::Tensor shard;
  /// What the module's member is. Weak, as it owns its storage, which owns the group.
  WeakTensor member;
  WeakStorage storage;
  std::shared_ptr<WriteObserver> observer;  // of the shard
  torch::Tensor accumulated{};        // whole gradients of backwards without sync, in reduce_dtype
  torch::Tensor partial{};            // sharded sums of backwards without all-reduce, undivided
  torch::Tensor stale_gradient{};     // what a handle from before wrapping finds as its gradient
  uint32_t local_version = 0;         // of the shard's local part, when it was last gathered
  bool member_requires_grad = false;  // as it was seen last
  bool uninitialised = false;         // to_empty() gave it memory, and nothing has written there

  torch::Tensor lock_member() const;
  /// Brings the flags of member and shard in line: a user may freeze or thaw either.
  void align_requires_grad(const torch::Tensor& member_tensor);
  /// Whether this very tensor, not a view of it, is the member.
  bool is_member(const torch::Tensor& tensor) const {
    return member._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  }
};

/// Where a shard belongs.
struct ShardWrites final : WriteObserver {
  ShardWrites(std::weak_ptr<ParamGroup> group, size_t index)
      : group(std::move(group)), index(index) {}
  void before_write() override;
  const std::weak_ptr<ParamGroup> group;
  const size_t index;
};

/// Not thread-safe by itself: the schedule's lock guards it, but for the pin count.
class ParamGroup final : public std::enable_shared_from_this<ParamGroup> {
 public:
  ParamGroup(DeviceMesh mesh, const GroupPolicy& policy) : policy(policy), mesh_(std::move(mesh)) {}

  const GroupPolicy policy;

  /// Takes over whole parameters: makes their shards, and turns each into a member that gathers
  /// itself. Dense leaf tensors. Collective when the mesh's reduction group has yet to be made.
  void adopt(const std::vector<ParamSpec>& specs);

  // Bytes.
  bool unsharded() const { return unsharded_; }
  bool gathering() const { return gather_ != nullptr; }
  void start_gather(const GatherWords& words);
  /// Blocks until the whole parameters are there. Returns what all ranks said.
  std::vector<GatherWords> finish_gather();
  /// Frees the whole parameters, or an unfinished gather; waits for nothing. Nothing happens while
  /// pinned.
  void reshard();
  /// The same, but keeps this rank's part among the ranks of post_forward_mesh, if there is one.
  void reshard_after_forward_pass();
  /// 1-D, a part of the sharding dimension. Undefined: none.
  void set_post_forward_mesh(const DeviceMesh& mesh);
  /// Error naming parameters that are on the meta device, or have memory but no values yet.
  void check_initialised() const;
  /// Gives a parameter on the meta device memory. Nothing happens elsewhere.
  void materialise(size_t index);

  // Gradients.
  bool trainable() const;
  /// Whether some parameter's whole gradient is there.
  bool has_gradients() const;
  /// Moves the gradients that members have to where the next reduction, which has to be this
  /// group's, takes them from, if that is possible now: they are still in the cache then.
  void stage_gradients();
  /// Starts the reduction of whatever gradients the members have (absent ones count as zero) and
  /// takes them away.
  void start_reduce(uint32_t fingerprint);
  bool reducing() const { return !reduces_.empty(); }
  /// Reductions stay within one copy for now.
  bool keeps_partial_sums() const { return !requires_all_reduce && mesh_.ndim() == 2; }
  /// Blocks; adds the mean over ranks to the shards' gradients and runs the hooks that users put on
  /// the shards.
  void finish_reduce();
  void discard_gradients();
  /// After a backward without sync: members' gradients move on in the dtype of the reduction, if
  /// that is another.
  void accumulate_gradients();
  /// Whoever still holds the members as if they were the parameters (an optimizer made before
  /// wrapping) would find no gradient and silently do nothing. From here on it finds one whose use
  /// is an error, until the next accumulation.
  void poison_gradients();
  /// Error if a member's storage was replaced since wrapping.
  void check_member(size_t index) const;

  /// A shard is about to be written: gathered bytes are stale from here on, and a graph that saved
  /// the member must fail in backward as it does in plain torch.
  void before_write(size_t index);
  /// The same, found out late: writes that went around the DTensor, through to_local().
  void notice_local_writes();
  int64_t generation() const { return generation_; }

  /// A parent was wrapped: the parameter has a longer name.
  void rename(size_t index, const std::string& name);
  /// Its parameters' names, for errors.
  const std::string& name() const { return name_; }
  const DeviceMesh& mesh() const { return mesh_; }
  GroupComm& comm() { return *comm_; }
  std::vector<Param>& params() { return params_; }
  const std::vector<Param>& params() const { return params_; }

  // What the schedule keeps with each group.
  std::shared_ptr<Schedule> schedule;
  int64_t id = 0;  // the same on all ranks
  std::set<const ParamGroup*>
      ancestors;  // groups of modules that contain one of this group's modules
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  /// False: gradients stay whole, on this rank, and add up until a backward with true.
  bool requires_gradient_sync = true;
  /// False: gradients are summed over the ranks of one copy only, and add up there.
  bool requires_all_reduce = true;
  bool owes_reduction = false;  // there was a backward without sync, or without all-reduce
  bool unshard_in_backward = true;
  bool used_for_training = false;  // there was a forward with autograd
  bool initialising = false;       // init_weights() runs
  /// Whether an op may write to members, that is, to the shards.
  bool writable() const { return initialising || !used_for_training; }
  size_t reduces_in_flight = 1;  // most at once, before this group's starts
  std::optional<double> gradient_divide_factor;
  std::function<void(const torch::Tensor&)> all_reduce_hook;
  /// To be gathered when this group has been; not given: by what followed last time.
  std::optional<std::vector<std::weak_ptr<ParamGroup>>> forward_prefetch, backward_prefetch;
  bool prefetched_on_request = false;
  bool kept_by_user = false;  // by unshard(), until reshard() or the end of backward
  std::atomic<int> pins{0};   // ops running on the bytes right now
  std::set<size_t>
      touched;  // trainable parameters used with grad mode on since the last forward began
  std::set<size_t> arrived;  // of these, whose gradient is there in this backward

 private:
  struct PendingReduce {
    std::vector<size_t> params;
    bool partial;  // to be kept for a later one
    std::unique_ptr<Reduce> reduce;
  };
  torch::Tensor make_shard(const torch::Tensor& member, const ParamLayout& layout);
  torch::Tensor make_member_data(const ParamLayout& layout, c10::Storage storage) const;
  void unstage_gradients();
  /// Of the parameters in `params` order; the dtype of their reduction.
  std::map<torch::ScalarType, std::vector<size_t>> reduced_together() const;
  void add_gradient(Param& param, torch::Tensor gradient);
  void name_group();

  std::string name_, gather_text_, reduce_text_;
  struct {
    std::string gather, wait_gather, reduce, wait_reduce;
  } ranges_;  // in traces
  DeviceMesh mesh_;
  std::vector<Param> params_;
  std::unique_ptr<GroupComm> comm_, post_forward_comm_;
  DeviceMesh post_forward_mesh_;
  std::vector<torch::Tensor> post_forward_shards_;  // of whole parameters that were let go
  std::unique_ptr<Gather> gather_;
  std::unique_ptr<ReduceStage> stage_;
  std::vector<PendingReduce> reduces_;
  bool unsharded_ = false;
  std::atomic<int64_t> generation_{0};
};

}  // namespace fsdp2::fsdp
