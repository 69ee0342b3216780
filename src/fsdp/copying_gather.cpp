#include "fsdp/checks.h"
#include "fsdp/copying_comm.h"
#include "fsdp/plain_ops.h"

#include <cstring>

namespace fsdp2::fsdp {
namespace {

constexpr int64_t kAlignment =
    64;  // what the CPU allocator gives; kernels round differently on less
constexpr int64_t kWordBytes = 64;
static_assert(sizeof(GatherWords) <= kWordBytes);

c10::DataPtr allocate(const ParamLayout& layout, c10::Device device) {
  return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(layout.nbytes()));
}

/// Whether the shard is, byte for byte, what the allocator would give for the whole parameter.
bool serves_as_whole(const torch::Tensor& shard, const ParamLayout& layout, c10::Device device) {
  return shard.scalar_type() == layout.dtype && shard.device() == device && !shard.is_meta() &&
         shard.sizes() == layout.sizes && shard.strides() == layout.strides &&
         reinterpret_cast<uintptr_t>(shard.const_data_ptr()) % kAlignment == 0;
}

/// The shard's memory, kept.
c10::DataPtr alias_of(const torch::Tensor& shard) {
  return {shard.mutable_data_ptr(), new c10::Storage(shard.storage()),
          [](void* storage) { delete static_cast<c10::Storage*>(storage); }, shard.device()};
}

/// Of one rank, whose shards are whole.
class LocalGather final : public Gather {
 public:
  LocalGather(CommContextPtr context, std::vector<torch::Tensor> shards, const GatherWords& words)
      : context_(std::move(context)), shards_(std::move(shards)), words_{words} {}

  std::vector<c10::DataPtr> finish(const std::string&) override {
    PlainOps plain;
    std::vector<c10::DataPtr> out;
    out.reserve(shards_.size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      const ParamLayout& layout = context_->layouts[i];
      if (layout.numel > 0 && serves_as_whole(shards_[i], layout, context_->device)) {
        out.push_back(alias_of(shards_[i]));
        continue;
      }
      out.push_back(allocate(layout, context_->device));
      if (layout.numel > 0) context_->whole(out[i].get(), i).copy_(shards_[i]);
    }
    shards_.clear();
    return out;
  }
  const std::vector<GatherWords>& words() const override { return words_; }

 private:
  CommContextPtr context_;
  std::vector<torch::Tensor> shards_;
  std::vector<GatherWords> words_;
};

/// A tensor that every rank sends of one parameter, and where it lies in a rank's piece.
struct Item {
  size_t param;
  torch::ScalarType dtype;
  std::vector<int64_t> sizes;
  int64_t offset;
  int64_t nbytes;
};

class CopyingGather final : public Gather {
 public:
  CopyingGather(CommContextPtr context, std::shared_ptr<AllGather> custom,
                const std::vector<torch::Tensor>& shards, const GatherWords& words)
      : context_(std::move(context)), custom_(std::move(custom)), own_words_(words) {
    PlainOps plain;
    std::vector<torch::Tensor> sent;
    for (size_t i = 0; i < shards.size(); ++i) plan(i, shards[i], sent);
    const auto bytes = at::TensorOptions().dtype(torch::kByte).device(context_->device);
    input_ = allocate_buffer({piece_}, bytes);
    output_ = allocate_buffer({piece_ * context_->world}, bytes);
    auto words_tensor = at::zeros({kWordBytes}, at::TensorOptions().dtype(torch::kByte));
    if (!input_.is_meta()) {
      std::memcpy(words_tensor.data_ptr(), &words, sizeof words);
      input_.narrow(0, 0, kWordBytes).copy_(words_tensor);
    }
    for (size_t k = 0; k < items_.size(); ++k) {
      if (sent[k].numel() > 0)
        in_piece(input_, items_[k])
            .narrow(0, 0, sent[k].numel())
            .view(sent[k].sizes())
            .copy_(sent[k]);
    }
    work_ = custom_ ? (*custom_)(output_, input_, context_->gather_group)
                    : all_gather_single(output_, input_, context_->gather_group);
  }

  std::vector<c10::DataPtr> finish(const std::string& what) override {
    PlainOps plain;
    wait(work_, what);
    work_.reset();
    input_.reset();
    if (kChecks) read_words();
    std::vector<c10::DataPtr> out;
    out.reserve(context_->layouts.size());
    for (const ParamLayout& layout : context_->layouts)
      out.push_back(allocate(layout, context_->device));
    for (size_t k = 0; k < items_.size() && !context_->device.is_meta();) {
      const size_t param = items_[k].param;
      size_t end = k;
      while (end < items_.size() && items_[end].param == param) ++end;
      torch::Tensor whole = context_->whole(out[param].get(), param);
      if (whole.numel() > 0) {
        if (context_->layouts[param].extension) {
          rebuild(param, k, end, whole);
        } else {
          copy_out(items_[k], whole);
        }
      }
      k = end;
    }
    for (auto& [i, shard] : unsplit_) context_->whole(out[i].get(), i).copy_(shard);
    output_.reset();
    return out;
  }
  const std::vector<GatherWords>& words() const override { return words_; }

 private:
  torch::Tensor allocate_buffer(c10::IntArrayRef sizes, const at::TensorOptions& options) {
    return custom_ ? custom_->allocate(sizes, options) : at::empty(sizes, options);
  }

  void plan(size_t param, const torch::Tensor& shard, std::vector<torch::Tensor>& sent) {
    const ParamLayout& layout = context_->layouts[param];
    if (!layout.shard_dim) {
      unsplit_.emplace_back(param, shard);
      return;
    }
    const int64_t numel = layout.padded_chunk_numel(context_->world);
    if (!layout.extension) {
      add_item(param, layout.dtype, {numel});
      sent.push_back(shard);
      return;
    }
    torch::Tensor padded = at::zeros({numel}, shard.options());
    padded.narrow(0, 0, shard.numel()).copy_(shard.reshape({-1}));
    for (const torch::Tensor& tensor : layout.extension->pre_all_gather(padded)) {
      add_item(param, tensor.scalar_type(), tensor.sizes().vec());
      sent.push_back(tensor.contiguous());
    }
  }

  void add_item(size_t param, torch::ScalarType dtype, std::vector<int64_t> sizes) {
    const int64_t nbytes =
        c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
    items_.push_back({param, dtype, std::move(sizes), piece_, nbytes});
    piece_ += align_up(nbytes, kAlignment);
  }

  /// The item in one rank's piece, flat.
  static torch::Tensor in_piece(const torch::Tensor& piece, const Item& item) {
    return piece.narrow(0, item.offset, item.nbytes).view(item.dtype);
  }

  /// `part_of(rank)`: what that rank holds, flat, padded.
  template <class PartOf>
  void fill_parts(size_t param, const torch::Tensor& whole, const PartOf& part_of) const {
    for (int64_t rank = 0; rank < context_->world; ++rank) {
      const torch::Tensor target =
          context_->layouts[param].local_part(whole, context_->world, rank);
      if (target.numel() == 0) break;
      target.copy_(part_of(rank).narrow(0, 0, target.numel()).view(target.sizes()));
    }
  }

  void copy_out(const Item& item, const torch::Tensor& whole) const {
    fill_parts(item.param, whole, [&](int64_t rank) {
      return in_piece(output_.narrow(0, rank * piece_, piece_), item);
    });
  }

  void rebuild(size_t param, size_t begin, size_t end, const torch::Tensor& whole) const {
    const ParamLayout& layout = context_->layouts[param];
    std::vector<torch::Tensor> gathered;
    for (size_t k = begin; k < end; ++k) {
      const Item& item = items_[k];
      std::vector<int64_t> sizes = item.sizes;
      sizes.insert(sizes.begin(), context_->world);
      gathered.push_back(output_.view({context_->world, piece_})
                             .narrow(1, item.offset, item.nbytes)
                             .contiguous()
                             .view(item.dtype)
                             .view(sizes));
    }
    const torch::Tensor parts =
        at::empty({context_->world, layout.padded_chunk_numel(context_->world)}, whole.options());
    layout.extension->post_all_gather(gathered, parts);
    fill_parts(param, whole, [&](int64_t rank) { return parts[rank]; });
  }

  void read_words() {
    if (output_.is_meta()) return words_.assign(context_->world, own_words_);
    torch::Tensor all =
        output_.view({context_->world, piece_}).narrow(1, 0, kWordBytes).contiguous().cpu();
    words_.resize(context_->world);
    for (int64_t rank = 0; rank < context_->world; ++rank) {
      std::memcpy(&words_[rank], all.const_data_ptr<uint8_t>() + rank * kWordBytes,
                  sizeof(GatherWords));
    }
  }

  CommContextPtr context_;
  std::shared_ptr<AllGather> custom_;
  std::vector<Item> items_;
  int64_t piece_ = kWordBytes;  // bytes that one rank sends
  torch::Tensor input_, output_;
  std::vector<std::pair<size_t, torch::Tensor>> unsplit_;
  const GatherWords own_words_;
  std::vector<GatherWords> words_;
  Work work_;
};

}  // namespace

std::unique_ptr<Gather> start_copying_gather(CommContextPtr context,
                                             std::shared_ptr<AllGather> custom,
                                             const std::vector<torch::Tensor>& shards,
                                             const GatherWords& words) {
  if (context->world == 1 && !context->extended && !custom)
    return std::make_unique<LocalGather>(std::move(context), shards, words);
  return std::make_unique<CopyingGather>(std::move(context), std::move(custom), shards, words);
}

}  // namespace fsdp2::fsdp
