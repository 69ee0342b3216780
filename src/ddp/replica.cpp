#include "ddp/replica.h"

#include "ddp/plan.h"
#include "dispatch/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp2::ddp {
namespace {

using torch::autograd::variable_list;

struct PostHook : torch::autograd::FunctionPostHook {
  explicit PostHook(std::function<void()> run) : run(std::move(run)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    run();
    return outputs;
  }
  std::function<void()> run;
};

std::string list(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

}  // namespace

Replica::Replica(const Plan& plan, const ProcessGroup& group, const ReplicateOptions& options)
    : module_(plan.module),
      parameters_(plan.trained),
      names_(plan.trained_names),
      group_(group),
      find_unused_parameters_(options.find_unused_parameters),
      static_graph_(options.static_graph),
      broadcast_buffers_(options.broadcast_buffers),
      reducer_(make_reducer(plan.trained, group,
                            {options.bucket_cap_mb, options.gradient_as_bucket_view})) {}

void Replica::watch_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i]);
    accumulator->add_post_hook(std::make_unique<PostHook>([weak = weak_from_this(), i] {
      if (auto replica = weak.lock()) replica->gradient_ready(i);
    }));
    accumulators_.push_back(std::move(accumulator));
    parameters_[i].register_hook([weak = weak_from_this(), i](const torch::Tensor&) {
      if (auto replica = weak.lock()) replica->check_parameter(i);
    });
  }
}

std::string Replica::rank_text() const {
  return "rank " + std::to_string(group_->getRank()) + " of " + std::to_string(group_->getSize());
}

void Replica::check_parameter(size_t index) const {
  TORCH_CHECK(
      torch::autograd::impl::try_get_grad_accumulator(parameters_[index]) == accumulators_[index],
      "replicate: the parameter '", names_[index],
      "' was moved or cast after replicate(), so its gradient would not be averaged: call to() "
      "before replicate()");
}

void Replica::gradient_ready(size_t index) {
  const std::lock_guard lock(mutex_);
  if (!requires_gradient_sync) return;
  TORCH_CHECK(!at::GradMode::is_enabled(), "replicate: backward with create_graph reached '",
              names_[index],
              "', but the mean over ranks cannot be differentiated: take second derivatives by "
              "autograd::grad with create_graph, then call backward() without it");
  TORCH_CHECK(!parameters_[index].grad().is_sparse(), "replicate: the gradient of '", names_[index],
              "' is sparse: make it dense (Embedding: sparse(false)), or ignore this parameter");
  if (!backward_) begin_backward();
  if (!arrives(index)) return;
  --missing_;
  // The last one waits for the end, so that no rank tells the others that it has succeeded while
  // it may still fail.
  if (missing_ == 0) {
    last_ = index;
  } else {
    mark(index);
  }
}

bool Replica::arrives(size_t index) {
  const int count = ++arrivals_[index];
  if (!static_graph_) {
    TORCH_CHECK(count == 1, "replicate: the parameter '", names_[index],
                "' got gradients twice in one backward (two recomputations, or two threads, that "
                "use it): set static_graph if it always does, run all but the last under "
                "no_sync(), or use fully_shard");
    return true;
  }
  if (graph_.empty()) return false;  // how many there will be is known at the end
  TORCH_CHECK(count <= graph_[index], "replicate: static_graph is set, but the parameter '",
              names_[index], "' got ", count, " gradients in one backward and ", graph_[index],
              " in the first one: use the same parameters in every backward, or drop static_graph "
              "and set find_unused_parameters");
  return count == graph_[index];
}

void Replica::mark(size_t index) {
  marked_[index] = true;
  reducer_->mark(index);
}

void Replica::begin_backward() {
  reducer_->begin();
  arrivals_.assign(parameters_.size(), 0);
  marked_.assign(parameters_.size(), false);
  missing_ = parameters_.size();
  last_.reset();
  for (size_t i = 0; i < graph_.size(); ++i) {
    if (graph_[i] > 0) continue;
    mark(i);
    --missing_;
  }
  backward_ = ++backwards_;
  const auto if_open = [weak = weak_from_this(), open = backward_](void (Replica::*over)()) {
    const auto owner = weak.lock();
    if (!owner) return;
    const std::lock_guard lock(owner->mutex_);
    if (owner->backward_ != open) return;
    owner->backward_ = 0;
    ((*owner).*over)();
  };
  dispatch::at_end_of_backward([if_open] { if_open(&Replica::end_backward); },
                               [if_open] { if_open(&Replica::abandon_backward); });
}

std::string Replica::missing_of_static_graph() const {
  std::vector<std::string> missing;
  for (size_t i = 0; i < graph_.size(); ++i) {
    if (arrivals_[i] < graph_[i]) missing.push_back(names_[i]);
  }
  return list(missing);
}

void Replica::end_backward() {
  if (const std::string missing = missing_of_static_graph(); !missing.empty()) {
    abandon_backward();
    TORCH_CHECK(false, "replicate: static_graph is set, but ", missing,
                " got fewer gradients than in the first backward: use the same parameters in every "
                "backward, or drop static_graph and set find_unused_parameters");
  }
  // What is thrown from here on, the ranks throw together.
  if (last_) mark(*last_);
  for (size_t i = 0; i < marked_.size(); ++i) {
    if (!marked_[i]) mark(i);
  }
  try {
    reducer_->wait();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK(false, "replicate: reducing gradients failed on ", rank_text(),
                "; did every rank run backward? ",
                known ? known->what_without_backtrace() : error.what());
  }
  torch::autograd::Engine::get_default_engine().queue_callback([replica = shared_from_this()] {
    replica->check_counts();
    if (replica->static_graph_ && replica->graph_.empty()) replica->graph_ = replica->arrivals_;
    if (replica->broadcast_buffers_) replica->sync_buffers();
  });
}

void Replica::abandon_backward() {
  try {
    reducer_->abandon();
  } catch (const std::exception& error) {
    TORCH_WARN("replicate: ", rank_text(),
               " could not tell the others that backward has failed: ", error.what());
  }
}

void Replica::check_counts() const {
  const torch::Tensor counts = reducer_->counts().cpu();
  const int* count = counts.const_data_ptr<int>();
  std::vector<std::string> unused;
  for (size_t i = 0; i < names_.size(); ++i) {
    TORCH_CHECK(count[i] >= 0, "replicate: backward failed on another rank than ", rank_text(),
                ", and these gradients lack what it had: drop them with zero_grad()");
    if (count[i] < group_->getSize()) unused.push_back(names_[i]);
  }
  TORCH_CHECK(find_unused_parameters_ || static_graph_ || unused.empty(),
              "replicate: no gradient for ", list(unused),
              " on at least one rank. If that is meant, set find_unused_parameters; else use "
              "these parameters in the loss, or freeze them before replicate()");
}

void Replica::sync_buffers() const {
  auto module = module_.lock();
  if (module) broadcast_values(module->buffers(), group_);
}

}  // namespace fsdp2::ddp
