#include "ddp/shared_buckets.h"

#include "comm/reduce.h"
#include "comm/rendezvous.h"
#include "comm/share_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp2::ddp {
namespace {

constexpr size_t kLine = 64;  // bytes; no two ranks write to one

}  // namespace

/// In shared memory: the number of the last bucket that a rank has posted, averaged its part of,
/// and got whole. Buckets are numbered through all rounds, from 1.
struct alignas(64) SharedBuckets::Progress {
  comm::Counter posted, averaged, collected;
};

SharedBuckets::SharedBuckets(const ProcessGroup& group, std::shared_ptr<comm::Presence> presence,
                             std::vector<torch::Tensor> buckets)
    : presence_(std::move(presence)), buckets_(std::move(buckets)) {
  offsets_.push_back(0);
  for (const torch::Tensor& bucket : buckets_)
    offsets_.push_back(offsets_.back() + comm::round_up(bucket.nbytes(), kLine));
  offsets_.back() = comm::round_up(offsets_.back(), comm::kPageBytes);
  const auto ranks = static_cast<size_t>(presence_->size());
  memory_ = comm::share_memory(group, head() + ranks * offsets_.back(), "gradients of replicas");
  for (size_t i = 0; i < buckets_.size(); ++i) {
    std::byte* data = place(presence_->rank(), i);
    const c10::Storage& storage = buckets_[i].storage();
    std::memcpy(data, storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(
        {data, new std::shared_ptr<comm::SharedMemory>(memory_),
         [](void* kept) { delete static_cast<std::shared_ptr<comm::SharedMemory>*>(kept); },
         c10::kCPU});
  }
}

SharedBuckets::Progress& SharedBuckets::progress(int rank) const {
  return reinterpret_cast<Progress*>(memory_->data())[rank];
}

size_t SharedBuckets::head() const {
  return comm::round_up(static_cast<size_t>(presence_->size()) * sizeof(Progress),
                        comm::kPageBytes);
}

std::byte* SharedBuckets::place(int rank, size_t bucket) const {
  return memory_->data() + head() + static_cast<size_t>(rank) * offsets_.back() + offsets_[bucket];
}

std::pair<size_t, size_t> SharedBuckets::part(int rank, size_t bucket) const {
  const size_t bytes = buckets_[bucket].nbytes();
  const size_t share = comm::round_up(bytes / static_cast<size_t>(presence_->size()) + 1, kLine);
  const size_t from = std::min(bytes, share * static_cast<size_t>(rank));
  return {from, std::min(bytes, from + share)};
}

void SharedBuckets::check_intact() const {
  TORCH_CHECK(broken_.empty(),
              "this group's gradients cannot be reduced any more since: ", broken_);
}

void SharedBuckets::post() {
  check_intact();
  progress(presence_->rank()).posted.set(number_of(posted_));
  ++posted_;
  average(/*wait=*/false);
}

void SharedBuckets::average(bool wait) {
  const int own = presence_->rank();
  for (; averaged_ < posted_; ++averaged_) {
    const uint64_t number = number_of(averaged_);
    const auto [from, to] = part(own, averaged_);
    std::vector<const std::byte*> inputs;
    inputs.reserve(static_cast<size_t>(presence_->size()));
    for (int rank = 0; rank < presence_->size(); ++rank) {
      if (!wait && progress(rank).posted.get() < number) return;
      presence_->wait(progress(rank).posted, number, rank);
      inputs.push_back(place(rank, averaged_) + from);
    }
    const c10::ScalarType type = buckets_[averaged_].scalar_type();
    comm::add_up(place(own, averaged_) + from, inputs,
                 static_cast<int64_t>((to - from) / c10::elementSize(type)), type,
                 presence_->size());
    progress(own).averaged.set(number);
  }
}

void SharedBuckets::collect(size_t bucket, uint64_t number) {
  for (int rank = 0; rank < presence_->size(); ++rank) {
    if (rank == presence_->rank()) continue;
    presence_->wait(progress(rank).averaged, number, rank);
    const auto [from, to] = part(rank, bucket);
    std::memcpy(place(presence_->rank(), bucket) + from, place(rank, bucket) + from, to - from);
  }
}

void SharedBuckets::finish() {
  check_intact();
  try {
    average(/*wait=*/true);
    for (size_t i = 0; i < posted_; ++i) collect(i, number_of(i));
    if (posted_ == 0) return;
    const uint64_t last = number_of(posted_ - 1);
    progress(presence_->rank()).collected.set(last);
    for (int rank = 0; rank < presence_->size(); ++rank)
      presence_->wait(progress(rank).collected, last, rank);
  } catch (const std::exception& error) {
    broken_ = comm::plain_message(error);
    throw;
  }
  ++round_;
  posted_ = averaged_ = 0;
}

void SharedBuckets::give_up() {
  Progress& own = progress(presence_->rank());
  const uint64_t last = number_of(buckets_.size() - 1);
  own.posted.set(last);
  own.averaged.set(last);
  own.collected.set(last);
  ++round_;
  posted_ = averaged_ = 0;
}

}  // namespace fsdp2::ddp
