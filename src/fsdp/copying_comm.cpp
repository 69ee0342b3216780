#include "fsdp/checks.h"
#include "fsdp/group_comm.h"
#include "fsdp/plain_ops.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/collectives.h>
#include <fsdp2/placement.h>

#include <cstring>

namespace fsdp2::fsdp {
namespace {

constexpr int64_t kAlignment =
    64;  // what the CPU allocator gives; kernels round differently on less
constexpr int64_t kWordBytes = 64;
constexpr uint32_t kFingerprintBits = 24;
static_assert(sizeof(GatherWords) <= kWordBytes);

int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/// The raw bytes as a tensor of the given shape.
torch::Tensor view_bytes(void* data, const ParamLayout& layout, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides, c10::Device device) {
  return at::from_blob(data, sizes, strides,
                       at::TensorOptions().dtype(layout.dtype).device(device));
}

/// Where each parameter's part lies in one rank's piece of a flat buffer.
struct Pieces {
  std::vector<int64_t> offsets;
  int64_t total = 0;
};

std::vector<c10::DataPtr> allocate(const std::vector<ParamLayout>& layouts, c10::Device device) {
  std::vector<c10::DataPtr> out;
  out.reserve(layouts.size());
  c10::Allocator* allocator = c10::GetAllocator(device.type());
  for (const ParamLayout& layout : layouts) {
    out.push_back(allocator->allocate(static_cast<size_t>(layout.nbytes())));
  }
  return out;
}

struct Shared {
  std::vector<ParamLayout> layouts;
  ProcessGroup gather_group;
  ProcessGroup reduce_group;
  ProcessGroup replicate_group;  // null without replicas
  c10::Device device = c10::kCPU;
  int64_t world = 1;  // ranks that share one copy
  int64_t rank = 0;   // among these
  int64_t replicas = 1;
  Pieces gather_pieces;  // in bytes, after the words

  torch::Tensor whole(void* data, size_t param) const {
    const ParamLayout& layout = layouts[param];
    return view_bytes(data, layout, layout.sizes, layout.strides, device);
  }
};

class LocalGather final : public Gather {
 public:
  LocalGather(std::shared_ptr<const Shared> shared, std::vector<torch::Tensor> shards,
              const GatherWords& words)
      : shared_(std::move(shared)), shards_(std::move(shards)), words_{words} {}

  std::vector<c10::DataPtr> finish(const std::string&) override {
    PlainOps plain;
    std::vector<c10::DataPtr> out = allocate(shared_->layouts, shared_->device);
    for (size_t i = 0; i < out.size(); ++i) {
      if (shared_->layouts[i].numel > 0) shared_->whole(out[i].get(), i).copy_(shards_[i]);
    }
    shards_.clear();
    return out;
  }
  const std::vector<GatherWords>& words() const override { return words_; }

 private:
  std::shared_ptr<const Shared> shared_;
  std::vector<torch::Tensor> shards_;
  std::vector<GatherWords> words_;
};

class CopyingGather final : public Gather {
 public:
  CopyingGather(std::shared_ptr<const Shared> shared, const std::vector<torch::Tensor>& shards,
                const GatherWords& words)
      : shared_(std::move(shared)) {
    PlainOps plain;
    const auto bytes = at::TensorOptions().dtype(torch::kByte).device(shared_->device);
    const int64_t piece = kWordBytes + shared_->gather_pieces.total;
    input_ = at::empty({piece}, bytes);
    output_ = at::empty({piece * shared_->world}, bytes);
    auto words_tensor = at::zeros({kWordBytes}, at::TensorOptions().dtype(torch::kByte));
    std::memcpy(words_tensor.data_ptr(), &words, sizeof words);
    input_.narrow(0, 0, kWordBytes).copy_(words_tensor);
    for (size_t i = 0; i < shards.size(); ++i) {
      const ParamLayout& layout = shared_->layouts[i];
      if (layout.replicated) {
        replicated_.emplace_back(i, shards[i]);
      } else if (shards[i].numel() > 0) {
        part(input_, 0, i, shared_->rank).copy_(shards[i]);
      }
    }
    work_ = all_gather_single(output_, input_, shared_->gather_group);
  }

  std::vector<c10::DataPtr> finish(const std::string& what) override {
    PlainOps plain;
    wait(work_, what);
    work_.reset();
    input_.reset();
    if (kChecks) read_words();
    std::vector<c10::DataPtr> out = allocate(shared_->layouts, shared_->device);
    for (size_t i = 0; i < out.size(); ++i) {
      const ParamLayout& layout = shared_->layouts[i];
      if (layout.replicated || layout.numel == 0) continue;
      torch::Tensor whole = shared_->whole(out[i].get(), i);
      for (int64_t rank = 0; rank < shared_->world; ++rank) {
        const Chunk chunk = chunk_of(layout.sizes[0], shared_->world, rank);
        if (chunk.length == 0) break;
        whole.narrow(0, chunk.offset, chunk.length).copy_(part(output_, rank, i, rank));
      }
    }
    for (auto& [i, shard] : replicated_) shared_->whole(out[i].get(), i).copy_(shard);
    output_.reset();
    return out;
  }
  const std::vector<GatherWords>& words() const override { return words_; }

 private:
  /// Parameter `param` in piece `piece` of a buffer, with the sizes of `rank`'s shard.
  torch::Tensor part(const torch::Tensor& buffer, int64_t piece, size_t param, int64_t rank) const {
    const ParamLayout& layout = shared_->layouts[param];
    const int64_t start = piece * (kWordBytes + shared_->gather_pieces.total) + kWordBytes +
                          shared_->gather_pieces.offsets[param];
    const std::vector<int64_t> sizes = layout.local_sizes(shared_->world, rank);
    const int64_t length = c10::multiply_integers(sizes) * c10::elementSize(layout.dtype);
    return buffer.narrow(0, start, length).view(layout.dtype).view(sizes);
  }

  void read_words() {
    const int64_t piece = kWordBytes + shared_->gather_pieces.total;
    torch::Tensor all =
        output_.view({shared_->world, piece}).narrow(1, 0, kWordBytes).contiguous().cpu();
    words_.resize(shared_->world);
    for (int64_t rank = 0; rank < shared_->world; ++rank) {
      std::memcpy(&words_[rank], all.const_data_ptr<uint8_t>() + rank * kWordBytes,
                  sizeof(GatherWords));
    }
  }

  std::shared_ptr<const Shared> shared_;
  torch::Tensor input_, output_;
  std::vector<std::pair<size_t, torch::Tensor>> replicated_;
  std::vector<GatherWords> words_;
  Work work_;
};

class LocalReduce final : public Reduce {
 public:
  LocalReduce(const Shared& shared, const std::vector<size_t>& params,
              const std::vector<torch::Tensor>& gradients, torch::ScalarType dtype) {
    PlainOps plain;
    for (size_t i = 0; i < params.size(); ++i) {
      result_.users.push_back(gradients[i].defined() ? 1 : 0);
      torch::Tensor own;
      if (gradients[i].defined()) own = gradients[i].to(dtype).contiguous();
      result_.gradients.push_back(own.defined() ? own.view(shared.layouts[params[i]].sizes) : own);
    }
  }
  Result finish(const std::string&) override { return std::move(result_); }

 private:
  Result result_;
};

/// One rank's piece: fingerprint bits, user flags, gradients; all in the gradients' dtype, so that
/// the one sum that adds gradients also adds the flags. Bits must come out as 0 or the number of
/// ranks.
class CopyingReduce final : public Reduce {
 public:
  CopyingReduce(std::shared_ptr<const Shared> shared, std::vector<size_t> params,
                const std::vector<torch::Tensor>& gradients, torch::ScalarType dtype,
                uint32_t fingerprint)
      : shared_(std::move(shared)),
        params_(std::move(params)),
        fingerprint_(fingerprint),
        dtype_(dtype) {
    PlainOps plain;
    const bool complex = c10::isComplexType(dtype_);
    const auto options =
        at::TensorOptions().dtype(c10::toRealValueType(dtype_)).device(shared_->device);
    words_ = align_up(kFingerprintBits + static_cast<int64_t>(params_.size()), 16);
    int64_t offset = words_;
    for (size_t param : params_) {
      offsets_.push_back(offset);
      const int64_t numel = shared_->layouts[param].padded_chunk_numel(shared_->world);
      offset += align_up(numel * (complex ? 2 : 1), 16);
    }
    piece_ = offset;
    input_ = at::zeros({shared_->world, piece_}, options);
    auto words = at::zeros({words_}, at::TensorOptions().dtype(torch::kFloat));
    float* word = words.mutable_data_ptr<float>();
    for (uint32_t bit = 0; bit < kFingerprintBits; ++bit)
      word[bit] = static_cast<float>((fingerprint >> bit) & 1u);
    for (size_t i = 0; i < params_.size(); ++i) {
      word[kFingerprintBits + i] = gradients[i].defined() ? 1.0F : 0.0F;
      if (gradients[i].defined()) copy_in(i, gradients[i]);
    }
    if (divisor_before() > 1) input_.div_(divisor_before());
    input_.narrow(1, 0, words_).copy_(words.expand({shared_->world, words_}));
    input_ = input_.view({-1});
    output_ = at::empty({piece_}, options);
    work_ = reduce_scatter_single(output_, input_, ReduceOp::kSum, shared_->reduce_group);
  }

  Result finish(const std::string& what) override {
    PlainOps plain;
    wait(work_, what);
    work_.reset();
    input_.reset();
    if (shared_->replicate_group) {
      wait(all_reduce(output_, ReduceOp::kSum, shared_->replicate_group), what);
    }
    Result result;
    torch::Tensor words = output_.narrow(0, 0, words_).to(torch::kFloat).cpu();
    const float* word = words.const_data_ptr<float>();
    const int64_t ranks = shared_->world * shared_->replicas;
    const bool countable = ranks <= 256 || c10::elementSize(dtype_) > 2;
    for (uint32_t bit = 0; kChecks && countable && bit < kFingerprintBits; ++bit) {
      const float expected = ((fingerprint_ >> bit) & 1u) ? static_cast<float>(ranks) : 0.0F;
      result.agreed = result.agreed && word[bit] == expected;
    }
    output_.narrow(0, words_, piece_ - words_).div_(static_cast<double>(ranks) / divisor_before());
    for (size_t i = 0; i < params_.size(); ++i) {
      const ParamLayout& layout = shared_->layouts[params_[i]];
      result.users.push_back(static_cast<int64_t>(word[kFingerprintBits + i]));
      result.gradients.push_back(
          part(output_, i, layout.local_sizes(shared_->world, shared_->rank)));
    }
    return result;
  }

 private:
  /// As FSDP2 splits the division of float16, about evenly.
  double divisor_before() const {
    const int64_t ranks = shared_->world * shared_->replicas;
    int64_t divisor = 1;
    if (dtype_ != torch::kHalf) return 1;
    while (ranks % divisor == 0 && ranks / divisor > divisor) divisor *= 2;
    return static_cast<double>(divisor);
  }

  torch::Tensor part(const torch::Tensor& piece, size_t i,
                     const std::vector<int64_t>& sizes) const {
    const int64_t numel = c10::multiply_integers(sizes);
    if (!c10::isComplexType(dtype_)) return piece.narrow(0, offsets_[i], numel).view(sizes);
    return at::view_as_complex(piece.narrow(0, offsets_[i], 2 * numel).view({numel, 2}))
        .view(sizes);
  }

  void copy_in(size_t i, const torch::Tensor& gradient) {
    const ParamLayout& layout = shared_->layouts[params_[i]];
    for (int64_t rank = 0; rank < shared_->world; ++rank) {
      torch::Tensor target = part(input_[rank], i, layout.local_sizes(shared_->world, rank));
      if (layout.replicated) {
        target.copy_(gradient);
        continue;
      }
      const Chunk chunk = chunk_of(layout.sizes[0], shared_->world, rank);
      if (chunk.length == 0) break;
      target.copy_(gradient.narrow(0, chunk.offset, chunk.length));
    }
  }

  std::shared_ptr<const Shared> shared_;
  std::vector<size_t> params_;
  uint32_t fingerprint_;
  torch::ScalarType dtype_;
  std::vector<int64_t> offsets_;
  int64_t words_ = 0, piece_ = 0;
  torch::Tensor input_, output_;
  Work work_;
};

class CopyingComm final : public GroupComm {
 public:
  CopyingComm(const DeviceMesh& mesh, std::vector<ParamLayout> layouts)
      : shared_(std::make_shared<Shared>()) {
    const int64_t shard_dim = mesh.ndim() - 1;
    shared_->layouts = std::move(layouts);
    shared_->gather_group = mesh.get_group(shard_dim);
    shared_->reduce_group = reduce_group_of(mesh, shard_dim);
    shared_->device = mesh.device();
    shared_->world = mesh.size(shard_dim);
    shared_->rank = mesh.get_local_rank(shard_dim);
    if (mesh.ndim() == 2 && mesh.size(0) > 1) {
      shared_->replicate_group = reduce_group_of(mesh, 0);
      shared_->replicas = mesh.size(0);
    }
    for (const ParamLayout& layout : shared_->layouts) {
      Pieces& pieces = shared_->gather_pieces;
      pieces.offsets.push_back(pieces.total);
      if (layout.replicated) continue;
      pieces.total += align_up(
          layout.padded_chunk_numel(shared_->world) * c10::elementSize(layout.dtype), kAlignment);
    }
  }

  std::unique_ptr<Gather> start_gather(const std::vector<torch::Tensor>& shards,
                                       const GatherWords& words) override {
    if (shared_->world == 1) return std::make_unique<LocalGather>(shared_, shards, words);
    return std::make_unique<CopyingGather>(shared_, shards, words);
  }

  std::unique_ptr<Reduce> start_reduce(const std::vector<size_t>& params,
                                       const std::vector<torch::Tensor>& gradients,
                                       torch::ScalarType dtype, uint32_t fingerprint) override {
    if (shared_->world * shared_->replicas == 1)
      return std::make_unique<LocalReduce>(*shared_, params, gradients, dtype);
    return std::make_unique<CopyingReduce>(shared_, params, gradients, dtype, fingerprint);
  }

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::vector<int64_t> ParamLayout::local_sizes(int64_t ranks, int64_t rank) const {
  std::vector<int64_t> local = sizes;
  if (!replicated) local[0] = chunk_of(sizes[0], ranks, rank).length;
  return local;
}

int64_t ParamLayout::padded_chunk_numel(int64_t ranks) const {
  return replicated ? numel : c10::multiply_integers(local_sizes(ranks, 0));
}

std::unique_ptr<GroupComm> make_copying_comm(const DeviceMesh& mesh,
                                             std::vector<ParamLayout> layouts) {
  return std::make_unique<CopyingComm>(mesh, std::move(layouts));
}

}  // namespace fsdp2::fsdp
