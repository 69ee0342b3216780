#include "comm/shared_reductions.h"

#include "comm/counting.h"
#include "comm/exits.h"
#include "comm/reduce.h"
#include "comm/share_memory.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

namespace fsdp2::comm {
namespace {

constexpr uint64_t kSlots = 2;

/// What a rank says of the reduction that it left in a slot.
struct Posted {
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> dtype;
};

/// In shared memory; numbers of reductions, from 1.
struct alignas(64) Reducing {
  Counter posted;
  Counter done;
  Posted slots[kSlots];
};

}  // namespace

/// Memory for two reductions at a time, and how far each rank is.
class SharedReductions::Slots {
 public:
  static size_t bytes(int ranks, size_t capacity) {
    return head(ranks) + kSlots * static_cast<size_t>(ranks) * round_up(capacity, kPageBytes);
  }

  Slots(std::shared_ptr<Presence> presence, std::shared_ptr<SharedMemory> memory)
      : presence_(std::move(presence)),
        memory_(std::move(memory)),
        capacity_((memory_->size() - head(presence_->size())) /
                  (kSlots * static_cast<size_t>(presence_->size()))) {}

  size_t capacity() const { return capacity_; }

  /// This rank's memory for the next reduction, the same until that is posted. Waits until nobody
  /// reads it any more.
  std::byte* next();
  /// Whether next() would not wait.
  bool next_is_free() const;

  /// What next() gave is filled. Returns the reduction's number.
  uint64_t post(const torch::Tensor& input, SumWork* work) {
    open_.push_back(work);
    Reducing& own = member(presence_->rank());
    Posted& posted = own.slots[number_ % kSlots];
    posted.bytes = input.nbytes();
    posted.dtype = static_cast<uint64_t>(input.scalar_type());
    own.posted.set(number_);
    posted_ = number_;
    return number_;
  }

  /// Blocks until all have posted; then `output` is the sum of this rank's parts, what follows the
  /// words divided. Not a number if others reduce something else.
  void add(const torch::Tensor& output, bool whole, uint64_t number, int64_t words,
           double divisor) const {
    bool alike = true;
    const size_t part = output.nbytes(), size = output.element_size();
    const auto parts = static_cast<size_t>(whole ? 1 : presence_->size());
    const size_t offset = whole ? 0 : part * static_cast<size_t>(presence_->rank());
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < presence_->size(); ++rank) {
      presence_->wait(member(rank).posted, number, rank);
      const Posted& posted = member(rank).slots[number % kSlots];
      alike = alike && posted.bytes == part * parts &&
              posted.dtype == static_cast<uint64_t>(output.scalar_type());
      inputs.push_back(place(rank, number) + offset);
    }
    auto* sums = static_cast<std::byte*>(output.mutable_data_ptr());
    if (!alike) {
      std::memset(sums, 0xFF, part);  // in every format not a number
      return;
    }
    add_up(sums, inputs, words, output.scalar_type());
    const size_t rest = static_cast<size_t>(words) * size;
    for (const std::byte*& input : inputs) input += rest;
    add_up(sums + rest, inputs, output.numel() - words, output.scalar_type(), divisor);
  }

  /// This rank is done with it. Others are told of all up to the first that it is not done with.
  void end(const SumWork* work);

 private:
  static size_t head(int ranks) {
    return round_up(static_cast<size_t>(ranks) * sizeof(Reducing), kPageBytes);
  }
  Reducing& member(int rank) const { return reinterpret_cast<Reducing*>(memory_->data())[rank]; }
  std::byte* place(int rank, uint64_t number) const {
    const auto ranks = static_cast<size_t>(presence_->size());
    return memory_->data() + head(presence_->size()) +
           (number % kSlots * ranks + static_cast<size_t>(rank)) * capacity_;
  }

  const std::shared_ptr<Presence> presence_;
  const std::shared_ptr<SharedMemory> memory_;
  const size_t capacity_;
  uint64_t number_ = 0, posted_ = 0;
  std::deque<SumWork*> open_;  // this rank's, in their order
};

class SharedReductions::SumWork final : public c10d::Work {
 public:
  SumWork(std::shared_ptr<Slots> slots, torch::Tensor output, const torch::Tensor& input,
          int64_t words, double divisor)
      : slots_(std::move(slots)),
        output_(std::move(output)),
        whole_(input.numel() == output_.numel()),
        words_(words),
        divisor_(divisor),
        number_(slots_->post(input, this)) {}
  ~SumWork() override { slots_->end(this); }

  uint64_t number() const { return number_; }

  bool wait(std::chrono::milliseconds) override {
    if (summed_) return true;
    slots_->add(output_, whole_, number_, words_, divisor_);
    summed_ = true;
    slots_->end(this);
    return true;
  }

 private:
  const std::shared_ptr<Slots> slots_;
  const torch::Tensor output_;
  const bool whole_;
  const int64_t words_;
  const double divisor_;
  const uint64_t number_;
  bool summed_ = false;
};

void SharedReductions::Slots::end(const SumWork* work) {
  std::erase(open_, work);
  Counter& done = member(presence_->rank()).done;
  const uint64_t up_to = open_.empty() ? posted_ : open_.front()->number() - 1;
  if (done.get() < up_to) done.set(up_to);
}

std::byte* SharedReductions::Slots::next() {
  if (number_ > posted_) return place(presence_->rank(), number_);
  // Whoever has posted the one before has ended the one before that: nobody is waited for below
  // who waits for us elsewhere.
  while (!open_.empty()) open_.front()->wait(kNoTimeout);
  ++number_;
  for (int rank = 0; number_ > kSlots && rank < presence_->size(); ++rank) {
    if (rank != presence_->rank()) presence_->wait(member(rank).done, number_ - kSlots, rank);
  }
  return place(presence_->rank(), number_);
}

bool SharedReductions::Slots::next_is_free() const {
  if (number_ > posted_) return true;
  for (int rank = 0; rank < presence_->size(); ++rank) {
    const Reducing& other = member(rank);
    if (!open_.empty() && other.posted.get() < posted_) return false;
    const bool own = rank == presence_->rank();
    if (!own && number_ + 1 > kSlots && other.done.get() < number_ + 1 - kSlots) return false;
  }
  return true;
}

SharedReductions::SharedReductions(std::shared_ptr<Presence> presence)
    : presence_(std::move(presence)) {}

void SharedReductions::want(size_t bytes) { wanted_ = std::max(wanted_, bytes); }

void SharedReductions::prepare(const ProcessGroup& group) {
  if (fits(wanted_)) return;
  if (const auto taken = std::exchange(taken_, nullptr)) taken();
  const size_t bytes = Slots::bytes(presence_->size(), wanted_);
  slots_ = std::make_shared<Slots>(presence_, share_memory(group, bytes, "gradients"));
}

bool SharedReductions::fits(size_t bytes) const { return slots_ && bytes <= slots_->capacity(); }

torch::Tensor SharedReductions::input_at(std::byte* data, int64_t numel,
                                         const at::TensorOptions& options) const {
  return torch::from_blob(data, {numel}, [kept = slots_](void*) {}, options);
}

torch::Tensor SharedReductions::next_input(int64_t numel, const at::TensorOptions& options) {
  if (forked_from_a_rank()) check_not_forked("a reduction on rank " + std::to_string(get_rank()));
  if (const auto taken = std::exchange(taken_, nullptr)) taken();
  return input_at(slots_->next(), numel, options);
}

torch::Tensor SharedReductions::early_input(int64_t numel, const at::TensorOptions& options,
                                            std::function<void()> taken) {
  if (taken_ || forked_from_a_rank() || !slots_->next_is_free()) return {};
  taken_ = std::move(taken);
  return input_at(slots_->next(), numel, options);
}

Work SharedReductions::start(const torch::Tensor& output, const torch::Tensor& input, int64_t words,
                             double divisor) {
  taken_ = nullptr;
  count_collective(input.numel() == output.numel() ? &CollectiveCounts::all_reduces
                                                   : &CollectiveCounts::reduce_scatters,
                   static_cast<int64_t>(input.nbytes()));
  return c10::make_intrusive<SumWork>(slots_, output, input, words, divisor);
}

}  // namespace fsdp2::comm
