#include "comm/shm/segment.h"

#include "comm/reduce.h"
#include "comm/rendezvous.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <numeric>

namespace fsdp2::comm {
namespace {

// A rank's ring stays in its core's cache.
constexpr uint64_t kSlotsToAll = 4;
constexpr size_t kBytesToAll = size_t{256} * 1024;
constexpr uint64_t kSlotsToOne = 4;
constexpr size_t kBytesToOne = size_t{32} * 1024;

const char* name_of(ShmKind kind) {
  static constexpr std::array names = {"barrier",        "broadcast",  "all_gather", "gather",
                                       "scatter",        "all_to_all", "reduce",     "all_reduce",
                                       "reduce_scatter", "message"};
  return names.at(static_cast<size_t>(kind));
}

}  // namespace

std::string ShmCall::text() const {
  std::string text = name_of(kind);
  if (kind != ShmKind::kBarrier && kind != ShmKind::kAllToAll)
    text += c10::str(" of ", bytes, " bytes");
  if (reduces != 0) {
    text += c10::str(" (", name_of_reduction(static_cast<c10d::ReduceOp::RedOpType>(op)), " of ",
                     c10::toString(static_cast<c10::ScalarType>(dtype)), ")");
  }
  if (kind == ShmKind::kMessage) return text + c10::str(" with tag ", root);
  if (root >= 0) text += c10::str(" with root ", root);
  return text;
}

/// Where the parts of the memory begin.
struct ShmSegment::Layout {
  size_t fate, bells, read_of_all, read_of_one, to_all, to_one, end;
  size_t reads_per_rank;  // bytes

  explicit Layout(int ranks) {
    const auto n = static_cast<size_t>(ranks);
    const ShmRing all = {nullptr, kSlotsToAll, kBytesToAll};
    const ShmRing one = {nullptr, kSlotsToOne, kBytesToOne};
    reads_per_rank = round_up(n * sizeof(std::atomic<uint64_t>), 64);
    fate = round_up(Presence::bytes(ranks), 64);
    bells = fate + kPageBytes;
    read_of_all = bells + n * sizeof(ShmBell);
    read_of_one = read_of_all + n * reads_per_rank;
    to_all = round_up(read_of_one + n * reads_per_rank, kPageBytes);
    to_one = round_up(to_all + n * all.bytes(), kPageBytes);
    end = to_one + (ranks > 1 ? n * n * one.bytes() : 0);
  }
};

struct ShmSegment::Fate {
  std::atomic<uint32_t> state;  // 0: whole, 1: somebody writes why, 2: it is written
  std::array<char, kPageBytes - 64> why;
};

ShmSegment::ShmSegment(std::shared_ptr<SharedMemory> memory, const BackendOptions& options)
    : memory_(std::move(memory)),
      presence_(std::make_shared<Presence>(memory_, options.rank, options.global_ranks,
                                           options.group_name, options.timeout)),
      layout_(std::make_shared<Layout>(static_cast<int>(options.global_ranks.size()))) {}

std::shared_ptr<ShmSegment> ShmSegment::meet(const BackendOptions& options) {
  const auto exchange = [&](const char* key, const std::string& value) {
    return exchange_texts(c10::make_intrusive<c10d::PrefixStore>(key, options.store),
                          options.global_ranks[static_cast<size_t>(options.rank)],
                          options.global_ranks, value, "group '" + options.group_name + "'",
                          options.timeout);
  };
  const auto attempt = [](const std::function<void()>& what) -> std::string {
    try {
      what();
      return {};
    } catch (const std::exception& error) {
      return plain_message(error);
    }
  };
  const bool alone = options.global_ranks.size() == 1;
  std::shared_ptr<SharedMemory> memory;
  std::string failure;
  if (options.rank == 0) {
    const Layout layout(static_cast<int>(options.global_ranks.size()));
    failure = attempt([&] { memory = SharedMemory::create(layout.end, options.group_name); });
  }
  std::string ticket = memory ? memory->ticket() : std::string();
  if (!alone) ticket = exchange("ticket", ticket).front();
  if (options.rank != 0 && !ticket.empty())
    failure = attempt([&] { memory = SharedMemory::open(ticket); });
  std::shared_ptr<ShmSegment> segment;
  if (memory) {
    failure = attempt(
        [&] { segment = std::shared_ptr<ShmSegment>(new ShmSegment(std::move(memory), options)); });
  }
  // The first rank keeps the memory until all have it, and nobody goes on unless all do.
  const auto failures = alone ? std::vector<std::string>{failure} : exchange("opened", failure);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty())
      throw ShmRefused(c10::str("rank ", options.global_ranks[rank], ": ", failures[rank]));
  }
  return segment;
}

ShmBell& ShmSegment::bell(int rank) const {
  return reinterpret_cast<ShmBell*>(memory_->data() + layout_->bells)[rank];
}

void ShmSegment::ring(int other) const {
  ShmBell& bell = this->bell(other);
  const uint64_t wanted = bell.wanted.load(std::memory_order_seq_cst);
  if (wanted == 0) return;
  const auto own = static_cast<uint64_t>(rank()) + 1;
  if (wanted == ShmBell::kAnyone || wanted % (uint64_t{1} << 32U) == own || wanted >> 32U == own)
    bell.rings.raise();
}

ShmRing ShmSegment::to_all(int rank) const {
  ShmRing ring = {nullptr, kSlotsToAll, kBytesToAll};
  ring.start = memory_->data() + layout_->to_all + static_cast<size_t>(rank) * ring.bytes();
  return ring;
}

ShmRing ShmSegment::to_one(int from, int to) const {
  ShmRing ring = {nullptr, kSlotsToOne, kBytesToOne};
  ring.start =
      memory_->data() + layout_->to_one + static_cast<size_t>(from * size() + to) * ring.bytes();
  return ring;
}

std::atomic<uint64_t>& ShmSegment::read_of_all(int reader, int writer) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(memory_->data() + layout_->read_of_all +
                                                  static_cast<size_t>(reader) *
                                                      layout_->reads_per_rank)[writer];
}

std::atomic<uint64_t>& ShmSegment::read_of_one(int from, int to) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(memory_->data() + layout_->read_of_one +
                                                  static_cast<size_t>(to) *
                                                      layout_->reads_per_rank)[from];
}

std::string ShmSegment::break_up(const std::string& why) const {
  auto& fate = *reinterpret_cast<Fate*>(memory_->data() + layout_->fate);
  uint32_t whole = 0;
  if (fate.state.compare_exchange_strong(whole, 1)) {
    fate.why[why.copy(fate.why.data(), fate.why.size() - 1)] = '\0';
    fate.state.store(2);
    for (int other = 0; other < size(); ++other) bell(other).rings.raise();
  }
  // A rank that dies while it writes leaves the rest with their own words.
  for (int i = 0; i < 1000 && fate.state.load() == 1; ++i) relax();
  return fate.state.load() == 2 ? fate.why.data() : why;
}

bool ShmSegment::broken() const {
  const auto& fate = *reinterpret_cast<const Fate*>(memory_->data() + layout_->fate);
  return fate.state.load(std::memory_order_acquire) == 2;
}

}  // namespace fsdp2::comm
