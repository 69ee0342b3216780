#include "fsdp/shared_bytes.h"

#include "comm/share_memory.h"
#include "fsdp/plain_ops.h"

namespace fsdp2::fsdp {
namespace {

constexpr auto kPageBytes = static_cast<int64_t>(comm::kPageBytes);
constexpr int64_t kParameterAlignment = 64;  // as the CPU allocator's

/// While it lives, this rank reads the shared bytes.
struct Lease {
  Lease(std::shared_ptr<SharedBytes> bytes, uint64_t number)
      : bytes(std::move(bytes)), number(number) {}
  ~Lease() { bytes->let_go(number); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::shared_ptr<SharedBytes> bytes;
  uint64_t number;
};
using LeasePtr = std::shared_ptr<Lease>;

}  // namespace

/// `published` and `released` are numbers of gathers.
struct SharedBytes::Progress {
  comm::Counter published;
  comm::Counter released;
};

SharedBytes::SharedBytes(CommContextPtr context) : context_(std::move(context)) {
  int64_t end = align_up(context_->world * static_cast<int64_t>(sizeof(Progress)), kPageBytes);
  for (const ParamLayout& layout : context_->layouts) {
    offsets_.push_back(static_cast<size_t>(end));
    if (layout.shard_dim) end += align_up(layout.nbytes(), kParameterAlignment);
  }
  bytes_ = static_cast<size_t>(align_up(end, kPageBytes));
}

SharedBytes::Progress& SharedBytes::progress(int64_t rank) const {
  return reinterpret_cast<Progress*>(memory_->data())[rank];
}

void SharedBytes::make_memory() {
  memory_ = comm::share_memory(context_->gather_group, bytes_, "parameters");
}

bool SharedBytes::free_to_write(bool wait) const {
  for (int64_t rank = 0; rank < context_->world; ++rank) {
    comm::Counter& released = progress(rank).released;
    if (released.get() >= number_ - 1) continue;
    if (!wait) return false;
    presence().wait(released, number_ - 1, static_cast<int>(rank));
  }
  return true;
}

void SharedBytes::publish(const std::vector<torch::Tensor>& shards, bool again) {
  PlainOps plain;
  copied_.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const ParamLayout& layout = context_->layouts[i];
    const torch::Tensor& shard = shards[i];
    if (!layout.shard_dim || shard.numel() == 0) continue;
    const bool tracked = !shard.is_inference();
    const Copied now = {shard.const_data_ptr(),
                        tracked ? static_cast<int64_t>(shard._version()) : -1};
    if (again && tracked && copied_[i] == now) continue;
    layout.local_part(context_->whole(whole(i), i), context_->world, context_->rank).copy_(shard);
    copied_[i] = now;
  }
  progress(context_->rank).published.set(number_);
}

void SharedBytes::wait_for_all() const {
  for (int64_t rank = 0; rank < context_->world; ++rank) {
    presence().wait(progress(rank).published, number_, static_cast<int>(rank));
  }
}

std::vector<c10::DataPtr> SharedBytes::lease(const std::vector<torch::Tensor>& shards) {
  PlainOps plain;
  const auto lease = std::make_shared<Lease>(shared_from_this(), number_);
  std::vector<c10::DataPtr> out;
  out.reserve(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const ParamLayout& layout = context_->layouts[i];
    if (layout.shard_dim) {
      out.emplace_back(
          whole(i), new LeasePtr(lease),
          [](void* context) { delete static_cast<LeasePtr*>(context); }, context_->device);
      continue;
    }
    out.push_back(c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(layout.nbytes())));
    if (layout.numel > 0) context_->whole(out.back().get(), i).copy_(shards[i]);
  }
  return out;
}

void SharedBytes::let_go(uint64_t number) {
  if (!memory_) return;
  comm::Counter& released = progress(context_->rank).released;
  if (released.get() < number) released.set(number);
}

}  // namespace fsdp2::fsdp
