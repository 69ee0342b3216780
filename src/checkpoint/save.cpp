#include "checkpoint/save_files.h"

#include <fsdp2/dcp.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace fsdp2::dcp {

struct AsyncSave::State {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  bool reported = false;
  std::exception_ptr failure;

  void end(std::exception_ptr why) {
    {
      const std::lock_guard lock(mutex);
      done = true;
      failure = std::move(why);
    }
    ended.notify_all();
  }
  /// Throws the failure; with `once`, only if nobody has heard of it.
  void wait(bool once) {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
    const bool heard = std::exchange(reported, true);
    if (failure && !(once && heard)) std::rethrow_exception(failure);
  }
};

bool AsyncSave::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}
void AsyncSave::wait() const {
  if (state_) state_->wait(false);
}

namespace {

SaveJob plan(const StateDict& state, const std::string& folder, const SaveOptions& options,
             const Exchange& exchange) {
  SaveJob job;
  job.folder = folder;
  job.on_complete = options.on_complete;
  exchange.agree([&] {
    TORCH_CHECK_VALUE(!folder.empty(), "the folder has no name");
    job.threads = thread_count(options.threads, exchange);
    job.leaves = save_leaves(state, exchange);
  });
  job.plan = plan_save(job.leaves, exchange);
  if (exchange.rank() == 0) {
    for (const std::string& key : job.plan->disagreeing) {
      TORCH_WARN(exchange.doing(), ": ", key, " differs between ranks; rank ", exchange.ranks()[0],
                 "'s is saved");
    }
  }
  return job;
}

std::string doing(const std::string& folder) { return "saving " + folder; }

/// Copies of what is saved, by key; kept for the next time.
class Staging {
 public:
  /// Keeps of `job` what this rank writes, as copies.
  void stage(SaveJob& job, int rank) {
    std::unordered_set<std::string_view> owned;
    for (size_t e = 0; e < job.plan->entries.size(); ++e) {
      const auto& owners = job.plan->owners[e];
      if (std::count(owners.begin(), owners.end(), rank) > 0) {
        owned.insert(job.plan->entries[e].key);
      }
    }
    std::erase_if(job.leaves, [&](const SaveLeaf& leaf) { return owned.count(leaf.key) == 0; });
    std::unordered_map<std::string, torch::Tensor> used;
    for (SaveLeaf& leaf : job.leaves) {
      if (leaf.is_tensor()) leaf.data = used[leaf.key] = copy(leaf);
    }
    copies_ = std::move(used);
  }
  void clear() { copies_.clear(); }

 private:
  torch::Tensor copy(const SaveLeaf& leaf) {
    torch::NoGradGuard no_grad;
    const auto place = copies_.find(leaf.key);
    torch::Tensor to = place == copies_.end() ? torch::Tensor() : place->second;
    if (!to.defined() || to.sizes() != leaf.data.sizes() || to.scalar_type() != leaf.dtype) {
      to = torch::empty(leaf.data.sizes(),
                        torch::TensorOptions(leaf.dtype).pinned_memory(leaf.data.is_cuda()));
    }
    return to.copy_(leaf.data);
  }

  std::unordered_map<std::string, torch::Tensor> copies_;
};

/// The one save that may be under way in this process.
class Background {
 public:
  static Background& instance() {
    static auto* background = [] {
      std::atexit([] { instance().join(); });
      return new Background();
    }();
    return *background;
  }

  /// Until nothing is under way.
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  /// Throws what nobody has heard of yet.
  void report() {
    if (const auto last = std::exchange(last_, nullptr)) last->wait(true);
  }
  AsyncSave start(SaveJob job, Exchange exchange) {
    last_ = std::make_shared<AsyncSave::State>();
    thread_ = std::thread([state = last_, job = std::move(job), exchange = std::move(exchange)] {
      try {
        run(job, exchange);
        state->end(nullptr);
      } catch (...) {
        state->end(std::current_exception());
      }
    });
    return AsyncSave(last_);
  }

  Staging staging;

 private:
  std::thread thread_;
  std::shared_ptr<AsyncSave::State> last_;
};

}  // namespace

void save(const StateDict& state, const std::string& folder, const SaveOptions& options) {
  Background& background = Background::instance();
  background.join();
  const Exchange exchange(options.process_group, doing(folder));
  exchange.agree([&] { background.report(); });
  run(plan(state, folder, options, exchange), exchange);
}

AsyncSave async_save(const StateDict& state, const std::string& folder,
                     const SaveOptions& options) {
  Background& background = Background::instance();
  background.join();
  Exchange exchange(options.process_group, doing(folder));
  exchange.agree([&] { background.report(); });
  SaveJob job = plan(state, folder, options, exchange);
  exchange.agree([&] { background.staging.stage(job, exchange.rank()); });
  return background.start(std::move(job), std::move(exchange));
}

void finish_async_saves() {
  Background& background = Background::instance();
  background.join();
  background.staging.clear();
  background.report();
}

}  // namespace fsdp2::dcp
