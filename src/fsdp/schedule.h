#pragma once

// When groups gather, free and reduce. One schedule serves all groups below one root.
//
// Every decision that ranks must share is taken at *gather events*: the first touch of a group that
// is not unsharded. They happen in program order, the same on all ranks, and each carries words
// that prove it. At an event the groups of modules that do not contain the one being gathered are
// freed (FSDP2's rule, without its hooks), and the group that followed last time is prefetched.
// Touches of unsharded groups decide nothing, so a branch that only some ranks take does no harm
// inside a group.
//
// Reductions leave in one order: the reverse of the order of first gathers. A group that is done
// waits for its predecessors; what is left at the end of backward is flushed in that order, absent
// gradients as zeros.

#include "fsdp/param_group.h"

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace fsdp2::fsdp {

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  /// Adds a group; wraps done later may merge two schedules into one. Both must be outside of
  /// backward.
  void add(const std::shared_ptr<ParamGroup>& group);
  void absorb(Schedule& other);
  /// Runs at the end of every backward, until another schedule absorbs this one.
  void check_after_backward(std::function<void()> check);

  /// An op is about to read the data of a parameter: gathers its group if need be, pins it. Unpin
  /// after the op.
  void touch(ParamGroup& group, size_t param);
  void unpin(ParamGroup& group);
  void gradient_ready(ParamGroup& group, size_t param);
  void shards_changed(ParamGroup& group);

  // What FSDPModule's controls do.
  void unshard(ParamGroup& group, bool async_op);
  void reshard(ParamGroup& group);
  /// Drops everything that belongs to the current iteration, gradients that add up included.
  void reset();
  /// Runs once, before the next use of a parameter.
  void check_before_use(std::function<void()> check);

 private:
  enum class Mode : int64_t { kForward = 0, kBackward = 1 };

  void begin_forward();
  void begin_backward();
  void end_backward();
  void abandon_backward();
  void ensure_unsharded(ParamGroup& group);
  void start_gather(ParamGroup& group);
  void remember(ParamGroup& group);
  void prefetch(const ParamGroup* gathered);
  void plan_reduce(ParamGroup& group);
  void free_unrelated(const ParamGroup& group);
  void issue_ready(bool flush);
  void finish_reduces(size_t in_flight = 0);
  bool ready(const ParamGroup& group) const;
  std::vector<std::shared_ptr<ParamGroup>> live_groups() const;
  Mode mode() const { return backward_ ? Mode::kBackward : Mode::kForward; }

  std::recursive_mutex mutex_;
  std::vector<std::weak_ptr<ParamGroup>> groups_;
  /// Those that are whole or on their way, and perhaps some that were freed since the last gather.
  std::vector<std::weak_ptr<ParamGroup>> open_;
  std::vector<std::function<void()>> checks_, first_checks_;
  int64_t gathers_ = 0;    // started so far; the same on all ranks
  int64_t backwards_ = 0;  // begun so far

  /// (mode, group before, group) -> the group that came next. 0 stands for "the pass began".
  using Step = std::tuple<Mode, const ParamGroup*, const ParamGroup*>;
  struct StepHash {
    size_t operator()(const Step& step) const;
  };
  std::unordered_map<Step, std::weak_ptr<ParamGroup>, StepHash> successors_;
  std::vector<const ParamGroup*> pass_;  // groups gathered in this pass, in order

  std::vector<std::weak_ptr<ParamGroup>> order_;  // by first gather since the last forward began
  bool backward_done_ = false;                    // since then
  int64_t backward_ = 0;                          // the open one; 0: none
  std::set<int> backward_tasks_;                  // its graph tasks, nested ones included
  std::set<std::thread::id> backward_threads_;    // and the threads that run them
  std::vector<std::shared_ptr<ParamGroup>> reduce_order_;
  size_t reduce_cursor_ = 0;
  std::vector<std::shared_ptr<ParamGroup>> reducing_;
};

}  // namespace fsdp2::fsdp
