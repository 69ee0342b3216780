#include "fsdp/schedule.h"

#include "dispatch/backward.h"
#include "fsdp/checks.h"
#include "fsdp/plain_ops.h"

#include <algorithm>
#include <sstream>

namespace fsdp2::fsdp {
namespace {

using dispatch::inside_backward;

std::string describe(const GatherWords& words) {
  std::ostringstream out;
  out << "group " << words.group << ", gather " << words.sequence << ", shards written "
      << words.generation << " times, " << (words.mode ? "backward" : "forward");
  return out.str();
}

void check_agreement(const ParamGroup& group, const std::vector<GatherWords>& words) {
  if (!kChecks) return;
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (words[rank] == words[0]) continue;
    std::ostringstream message;
    message << "ranks disagree about the all-gather of parameter group '" << group.name()
            << "' (group " << group.id << "):";
    for (size_t r = 0; r < words.size(); ++r)
      message << "\n  rank " << r << ": " << describe(words[r]);
    message << "\nEvery rank must use the wrapped modules in the same order and write to their "
               "parameters alike; a weight that one rank alone logs must be gathered by all.";
    TORCH_CHECK(false, message.str());
  }
}

}  // namespace

size_t Schedule::StepHash::operator()(const Step& step) const {
  return std::hash<const void*>()(std::get<1>(step)) * 31 +
         std::hash<const void*>()(std::get<2>(step)) * 2 + static_cast<size_t>(std::get<0>(step));
}

void Schedule::add(const std::shared_ptr<ParamGroup>& group) {
  std::lock_guard lock(mutex_);
  // The same on all ranks, also if some of them have wrapped other modules besides.
  std::string identity = std::to_string(groups_.size());
  for (const Param& param : group->params()) identity += '\n' + param.layout.name;
  group->id = static_cast<int64_t>(std::hash<std::string>()(identity) >> 16);
  group->schedule = shared_from_this();
  groups_.push_back(group);
}

void Schedule::absorb(Schedule& other) {
  if (&other == this) return;
  std::scoped_lock lock(mutex_, other.mutex_);
  for (const auto& group : other.live_groups()) {
    group->reshard();
    add(group);
  }
  first_checks_.insert(first_checks_.end(), other.first_checks_.begin(), other.first_checks_.end());
  other.groups_.clear();
  other.checks_.clear();
  other.first_checks_.clear();
}

void Schedule::check_after_backward(std::function<void()> check) {
  std::lock_guard lock(mutex_);
  checks_.push_back(std::move(check));
}

std::vector<std::shared_ptr<ParamGroup>> Schedule::live_groups() const {
  std::vector<std::shared_ptr<ParamGroup>> live;
  for (const auto& weak : groups_) {
    if (auto group = weak.lock()) live.push_back(std::move(group));
  }
  return live;
}

void Schedule::check_before_use(std::function<void()> check) {
  std::lock_guard lock(mutex_);
  first_checks_.push_back(std::move(check));
}

void Schedule::touch(ParamGroup& group, size_t param) {
  std::lock_guard lock(mutex_);
  if (!group.unsharded()) group.check_initialised();
  while (!first_checks_.empty() && !group.initialising) {
    first_checks_.back()();
    first_checks_.pop_back();
  }
  if (inside_backward()) {
    begin_backward();
  } else {
    begin_forward();
  }
  if (at::GradMode::is_enabled() && group.params()[param].shard.requires_grad()) {
    group.touched.insert(param);
    group.used_for_training = true;
  }
  if (kChecks && group.unsharded() && group.pins == 0) group.notice_local_writes();
  ensure_unsharded(group);
  ++group.pins;
}

void Schedule::unpin(ParamGroup& group) { --group.pins; }

void Schedule::begin_forward() {
  if (backward_) {
    TORCH_CHECK(backward_threads_.count(std::this_thread::get_id()),
                "a wrapped module runs forward in one thread while another runs its backward: run "
                "them one after the other.");
    abandon_backward();
  }
  if (!backward_done_) return;
  backward_done_ = false;
  order_.clear();
  pass_.clear();
  for (const auto& group : live_groups()) {
    group->touched.clear();
    if (group->unsharded() || group->gathering()) order_.push_back(group);
  }
}

void Schedule::ensure_unsharded(ParamGroup& group) {
  if (group.unsharded()) return;
  PlainOps plain;
  const bool prefetched = group.gathering();
  free_unrelated(group);
  if (!prefetched) start_gather(group);
  remember(group);
  check_agreement(group, group.finish_gather());
  group.prefetched_on_request = false;
  prefetch(&group);
}

void Schedule::prefetch(const ParamGroup* gathered) {
  const auto may_gather = [&](const std::shared_ptr<ParamGroup>& next) {
    return next && !next->unsharded() && !next->gathering() &&
           (!backward_ || next->unshard_in_backward);
  };
  const auto* request = !gathered   ? nullptr
                        : backward_ ? &gathered->backward_prefetch
                                    : &gathered->forward_prefetch;
  if (request && *request) {
    for (const auto& weak : **request) {
      const auto next = weak.lock();
      if (!may_gather(next)) continue;
      TORCH_CHECK(next->schedule.get() == this, "group '", gathered->name(),
                  "' is to prefetch group '", next->name(),
                  "', which belongs to another root module");
      next->prefetched_on_request = true;
      start_gather(*next);
    }
    return;
  }
  const size_t n = pass_.size();
  const auto found =
      successors_.find({mode(), n > 1 ? pass_[n - 2] : nullptr, n > 0 ? pass_[n - 1] : nullptr});
  if (found == successors_.end()) return;
  const auto next = found->second.lock();
  if (may_gather(next)) start_gather(*next);
}

void Schedule::start_gather(ParamGroup& group) {
  const GatherWords words{group.id, gathers_++, group.generation(), static_cast<int64_t>(mode())};
  const std::weak_ptr<ParamGroup> own = group.weak_from_this();
  const auto known = [&](const auto& weak) {
    return !weak.owner_before(own) && !own.owner_before(weak);
  };
  if (std::none_of(order_.begin(), order_.end(), known)) order_.push_back(own);
  if (std::none_of(open_.begin(), open_.end(), known)) open_.push_back(own);
  group.start_gather(words);
  if (backward_) plan_reduce(group);
}

void Schedule::plan_reduce(ParamGroup& group) {
  const auto planned = [&](const auto& other) { return other.get() == &group; };
  if (!group.trainable()) return;
  if (!group.requires_gradient_sync) {
    group.owes_reduction = true;
  } else if (std::none_of(reduce_order_.begin(), reduce_order_.end(), planned)) {
    reduce_order_.push_back(group.shared_from_this());
  }
}

void Schedule::remember(ParamGroup& group) {
  if (std::find(pass_.begin(), pass_.end(), &group) != pass_.end()) pass_.clear();
  const size_t n = pass_.size();
  const ParamGroup* last = n > 0 ? pass_[n - 1] : nullptr;
  const ParamGroup* before = n > 1 ? pass_[n - 2] : nullptr;
  successors_[{mode(), before, last}] = group.weak_from_this();
  pass_.push_back(&group);
}

void Schedule::free_unrelated(const ParamGroup& group) {
  std::erase_if(open_, [](const auto& weak) {
    const auto known = weak.lock();
    return !known || (!known->unsharded() && !known->gathering());
  });
  for (const auto& weak : open_) {
    const auto other = weak.lock();
    if (!other || other.get() == &group || other->kept_by_user) continue;
    const bool wrong_guess = other->gathering() && !other->prefetched_on_request;
    const bool kept =
        !other->reshard_after_forward || (backward_ && !other->reshard_after_backward);
    const bool done = other->unsharded() && !kept && group.ancestors.count(other.get()) == 0;
    if (done && !backward_) {
      other->reshard_after_forward_pass();
    } else if (wrong_guess || done) {
      other->reshard();
    }
  }
}

void Schedule::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  const auto thread = std::this_thread::get_id();
  if (backward_) {
    // A task of its own is a backward inside this one if a thread that runs this one started it.
    TORCH_CHECK(backward_tasks_.count(task) || backward_threads_.count(thread),
                "two threads run backward through one wrapped module at once: run them one after "
                "the other.");
    backward_tasks_.insert(task);
    backward_threads_.insert(thread);
    return;
  }
  backward_tasks_ = {task};
  backward_threads_ = {thread};
  ++backwards_;
  const ParamGroup* last = pass_.empty() ? nullptr : pass_.back();
  pass_.clear();
  reduce_order_.clear();
  reduce_cursor_ = 0;
  for (const auto& group : live_groups()) group->arrived.clear();
  backward_ = backwards_;
  const auto if_open = [weak = weak_from_this(), open = backward_](void (Schedule::*over)()) {
    const auto owner = weak.lock();
    if (!owner) return;
    std::lock_guard lock(owner->mutex_);
    if (owner->backward_ == open) ((*owner).*over)();
  };
  dispatch::at_end_of_backward([if_open] { if_open(&Schedule::end_backward); },
                               [if_open] { if_open(&Schedule::abandon_backward); });
  for (auto weak = order_.rbegin(); weak != order_.rend(); ++weak) {
    if (auto group = weak->lock()) plan_reduce(*group);
  }
  // Gradients of earlier backwards, of groups that this one may not use.
  for (const auto& group : live_groups()) {
    if (group->owes_reduction) plan_reduce(*group);
  }
  prefetch(last);
}

void Schedule::gradient_ready(ParamGroup& group, size_t param) {
  std::lock_guard lock(mutex_);
  group.check_member(param);
  begin_backward();
  plan_reduce(group);
  group.arrived.insert(param);
  issue_ready(/*flush=*/false);
  const bool next =
      reduce_cursor_ < reduce_order_.size() && reduce_order_[reduce_cursor_].get() == &group;
  if (next) group.stage_gradients();
}

bool Schedule::ready(const ParamGroup& group) const {
  return !group.arrived.empty() && std::includes(group.arrived.begin(), group.arrived.end(),
                                                 group.touched.begin(), group.touched.end());
}

void Schedule::issue_ready(bool flush) {
  while (reduce_cursor_ < reduce_order_.size()) {
    ParamGroup& group = *reduce_order_[reduce_cursor_];
    if (!flush && !ready(group)) return;
    // Few reductions on their way at a time: their buffers are as large as the groups.
    finish_reduces(group.reduces_in_flight - 1);
    const auto fingerprint = static_cast<uint32_t>(group.id * 7919 + backwards_);
    group.start_reduce(fingerprint);
    group.owes_reduction = group.keeps_partial_sums();
    reducing_.push_back(reduce_order_[reduce_cursor_]);
    ++reduce_cursor_;
  }
}

void Schedule::finish_reduces(size_t in_flight) {
  while (reducing_.size() > in_flight) {
    const auto group = reducing_.front();
    reducing_.erase(reducing_.begin());
    group->finish_reduce();
  }
}

void Schedule::end_backward() {
  issue_ready(/*flush=*/true);
  // Gradients that came after their group had left: a module recomputed twice, say.
  for (const auto& group : reduce_order_) {
    if (!group->has_gradients()) continue;
    finish_reduces();
    group->start_reduce(static_cast<uint32_t>(group->id * 7919 + backwards_) + 1);
    reducing_.push_back(group);
  }
  finish_reduces();
  if (kChecks) {
    for (const auto& group : reduce_order_) group->poison_gradients();
  }
  backward_ = 0;
  backward_done_ = true;
  reduce_order_.clear();
  pass_.clear();
  for (const auto& group : live_groups()) {
    group->kept_by_user = false;
    if (!group->requires_gradient_sync) group->accumulate_gradients();
    if (group->reshard_after_backward) group->reshard();
  }
  if (!kChecks) return;
  for (const auto& check : checks_) check();
}

void Schedule::abandon_backward() {
  backward_ = 0;
  backward_done_ = true;
  reduce_order_.clear();
  reducing_.clear();
  pass_.clear();
  for (const auto& group : live_groups()) {
    group->discard_gradients();
    group->owes_reduction = false;
    group->kept_by_user = false;
    group->reshard();
  }
}

void Schedule::shards_changed(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  group.reshard();
}

void Schedule::unshard(ParamGroup& group, bool async_op) {
  std::lock_guard lock(mutex_);
  if (!inside_backward()) begin_forward();
  group.kept_by_user = true;
  if (group.unsharded()) return;
  PlainOps plain;
  if (!group.gathering()) start_gather(group);
  if (!async_op) check_agreement(group, group.finish_gather());
}

void Schedule::reset() {
  std::lock_guard lock(mutex_);
  abandon_backward();
}

void Schedule::reshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  group.kept_by_user = false;
  group.reshard();
}

}  // namespace fsdp2::fsdp
