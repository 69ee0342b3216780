#include "fsdp/copying_comm.h"

#include "fsdp/shared_bytes.h"
#include "mesh/mesh_impl.h"

namespace fsdp2 {

torch::Tensor CommBuffers::allocate(c10::IntArrayRef sizes, const torch::TensorOptions& options) {
  return at::empty(sizes, options);
}

namespace fsdp {
namespace {

class CopyingComm final : public GroupComm {
 public:
  CopyingComm(const DeviceMesh& mesh, std::vector<ParamLayout> layouts, bool reduces)
      : context_(std::make_shared<CommContext>()) {
    const int64_t shard_dim = mesh.ndim() - 1;
    context_->gather_group = mesh.get_group(shard_dim);
    if (reduces) context_->reduce_group = reduce_group_of(mesh, shard_dim);
    context_->device = mesh.device();
    context_->world = mesh.size(shard_dim);
    context_->rank = mesh.get_local_rank(shard_dim);
    if (reduces && mesh.ndim() == 2 && mesh.size(0) > 1) {
      context_->replicate_group = reduce_group_of(mesh, 0);
      context_->replicas = mesh.size(0);
    }
    for (const ParamLayout& layout : layouts)
      context_->extended = context_->extended || layout.extension;
    context_->layouts = std::move(layouts);
    if (!reduces || !context_->device.is_cpu()) return;
    if (context_->world == 1 && context_->replicate_group)
      context_->replicas_host = HostGroup::of(context_->replicate_group);
    if (context_->replicas_host)
      context_->replicas_host->reductions.want(largest_reduction(*context_));
    context_->host = HostGroup::of(context_->gather_group);
    if (!context_->host) return;
    context_->host->reductions.want(largest_reduction(*context_));
    if (!context_->extended) shared_ = std::make_shared<SharedBytes>(context_);
  }

  std::unique_ptr<Gather> start_gather(const std::vector<torch::Tensor>& shards,
                                       const GatherWords& words) override {
    if (shared_ && !custom_all_gather) return start_shared_gather(shared_, context_, shards, words);
    return start_copying_gather(context_, custom_all_gather, shards, words);
  }
  std::unique_ptr<Reduce> start_reduce(const std::vector<ReduceInput>& inputs,
                                       const ReduceOptions& options,
                                       std::unique_ptr<ReduceStage> stage) override {
    return start_copying_reduce(context_, custom_reduce_scatter, inputs, options, std::move(stage),
                                outputs_);
  }
  std::unique_ptr<ReduceStage> stage_reduce(std::vector<size_t> params, torch::ScalarType dtype,
                                            std::function<void()> taken) override {
    if (custom_reduce_scatter) return nullptr;
    return stage_shared_reduce(context_, std::move(params), dtype, std::move(taken));
  }

 private:
  std::shared_ptr<CommContext> context_;
  std::shared_ptr<SharedBytes> shared_;  // null: parameters travel
  ReduceOutputs outputs_;
};

}  // namespace

comm::SharedReductions* CommContext::shared_reductions(bool all) const {
  if (host) return &host->reductions;
  return replicas_host && all ? &replicas_host->reductions : nullptr;
}

torch::Tensor CommContext::whole(void* data, size_t param) const {
  const ParamLayout& layout = layouts[param];
  return at::for_blob(data, layout.sizes)
      .strides(layout.strides)
      .options(at::TensorOptions().dtype(layout.dtype).device(device))
      .target_device(device)
      .make_tensor();
}

std::vector<int64_t> ParamLayout::local_sizes(int64_t ranks, int64_t rank) const {
  std::vector<int64_t> local = sizes;
  if (shard_dim) local[*shard_dim] = chunk_of(sizes[*shard_dim], ranks, rank).length;
  return local;
}

torch::Tensor ParamLayout::local_part(const torch::Tensor& whole, int64_t ranks,
                                      int64_t rank) const {
  if (!shard_dim) return whole;
  const Chunk chunk = chunk_of(sizes[*shard_dim], ranks, rank);
  return whole.narrow(*shard_dim, chunk.offset, chunk.length);
}

Placements ParamLayout::placements(const DeviceMesh& mesh) const {
  Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
  if (shard_dim) placements.back() = Shard(*shard_dim);
  return placements;
}

int64_t ParamLayout::padded_chunk_numel(int64_t ranks) const {
  return c10::multiply_integers(local_sizes(ranks, 0));
}

std::unique_ptr<GroupComm> make_copying_comm(const DeviceMesh& mesh,
                                             std::vector<ParamLayout> layouts, bool reduces) {
  return std::make_unique<CopyingComm>(mesh, std::move(layouts), reduces);
}

}  // namespace fsdp
}  // namespace fsdp2
