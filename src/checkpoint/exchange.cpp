#include "checkpoint/exchange.h"

#include "comm/groups.h"
#include "comm/rendezvous.h"

#include <fsdp2/collectives.h>

#include <algorithm>
#include <exception>
#include <thread>

namespace fsdp2::dcp {

Exchange::Exchange(const ProcessGroup& group, std::string doing) : doing_(std::move(doing)) {
  const ProcessGroup all = group || !is_initialized() ? group : world_group();
  if (!all) {
    ranks_ = {0};
    return;
  }
  rank_ = all->getRank();
  size_ = all->getSize();
  ranks_ = comm::global_ranks(all);
  group_ = comm::host_group(all);
}

std::vector<std::string> Exchange::all(const std::function<std::string()>& body) const {
  std::string message;
  try {
    message = "+" + body();
  } catch (const std::exception& error) {
    message = "-" + comm::plain_message(error);
  }
  std::vector<std::string> messages =
      size_ == 1 ? std::vector{message} : all_gather_bytes(message, group_);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].starts_with('-')) {
      throw FailedEverywhere(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str(doing_, ": ", size_ == 1 ? "" : c10::str("rank ", ranks_[rank], ": "),
                   messages[rank].substr(1)));
    }
    messages[rank].erase(0, 1);
  }
  return messages;
}

void Exchange::agree(const std::function<void()>& body) const {
  all([&] {
    body();
    return std::string();
  });
}

int thread_count(int asked, const Exchange& exchange) {
  TORCH_CHECK_VALUE(asked >= 0, "threads must not be negative, got ", asked);
  if (asked > 0) return asked;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const char* local = std::getenv("LOCAL_WORLD_SIZE");
  const auto ranks = local == nullptr ? int64_t{exchange.size()}
                                      : std::max<int64_t>(1, std::strtoll(local, nullptr, 10));
  return static_cast<int>(std::clamp<int64_t>(cores / ranks, 1, 4));
}

void in_threads(const std::vector<std::function<void()>>& jobs) {
  std::vector<std::exception_ptr> failures(jobs.size());
  std::vector<std::thread> threads;
  const auto run = [&](size_t i) {
    try {
      jobs[i]();
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  for (size_t i = 1; i < jobs.size(); ++i) threads.emplace_back(run, i);
  if (!jobs.empty()) run(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace fsdp2::dcp
