// One checkpointed call: which tensors autograd wanted to save in it, and how to have them again.
// Rules as in torch.utils.checkpoint: a tensor belongs to the innermost checkpoint; the inputs of
// an inner one are tensors that the outer one saves; recomputation starts as if no checkpoint were
// active.

#include "recompute/saved_ops.h"
#include "recompute/saved_tensors.h"
#include "recompute/surroundings.h"

#include <fsdp2/activation_checkpoint.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <sstream>

namespace fsdp2::recompute {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

/// A recomputed tensor on its way to the one node that wants it.
struct Slot {
  Tensor value;
  int64_t task = 0;  // the backward that it was computed for
};

/// How often a parameter, or what a tensor is a view of if that is one, was written to. Others are
/// made anew by each run.
int64_t version_if_parameter(const Tensor& tensor) {
  const at::TensorBase& bare = tensor;
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : bare;
  return owner.is_leaf() && owner.requires_grad() ? static_cast<int64_t>(owner._version()) : -1;
}

/// What must be the same when the tensor is computed again.
struct Traits {
  explicit Traits(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()),
        parameter_version(version_if_parameter(tensor)) {}
  std::string text() const {
    std::ostringstream out;
    out << dtype << at::IntArrayRef(sizes) << " on " << device;
    return out.str();
  }
  bool operator==(const Traits&) const = default;

  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  int64_t parameter_version;
};

/// Ends a recomputation that has all it needs.
struct Stop : std::exception {
  explicit Stop(const void* who) : who(who) {}
  const char* what() const noexcept override {
    return "a recomputation is complete: do not catch this in a checkpointed function, or set "
           "CheckpointOptions::early_stop to false";
  }
  const void* who;
};

namespace {

constexpr const char* kDeterminism =
    "\nThe checkpointed function must do the same when it runs again: it may not depend on state "
    "that changed meanwhile.";

int64_t current_task() {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task != -1) return task;
  static std::atomic<int64_t> outside{-2};
  return outside--;
}

}  // namespace

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(const CheckpointOptions& options, const std::vector<Tensor>& inputs,
        detail::Recompute recompute)
      : early_stop_(options.early_stop),
        recompute_(std::move(recompute)),
        surroundings_(inputs, options.preserve_rng_state),
        saved_ops_(SavedOps::make(options)) {
    inputs_.reserve(inputs.size());
    for (const Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  void forward_is_done() { forward_done_ = true; }
  bool is_forward_done() const { return forward_done_; }
  SavedOps* saved_ops() const { return saved_ops_.get(); }
  const Surroundings& surroundings() const { return surroundings_; }

  void expect(const Tensor& tensor, const std::shared_ptr<Slot>& slot) {
    std::lock_guard lock(mutex_);
    traits_.emplace_back(tensor);
    slots_.push_back(slot);
  }

  Tensor value_of(Slot& slot) {
    std::lock_guard lock(mutex_);
    const int64_t task = current_task();
    if (!slot.value.defined() || slot.task != task) recompute(task);
    TORCH_INTERNAL_ASSERT(slot.value.defined());
    return std::exchange(slot.value, Tensor());
  }

  /// Tensor number `index` of a recomputation. False if nobody expects it.
  bool receive(const Tensor& tensor, const Tensor& value, size_t index, int64_t task) {
    if (index >= slots_.size()) {
      // A backward inside of the function itself, which has yet to save the rest.
      TORCH_CHECK(!forward_done_, "a checkpointed function saved ", slots_.size(),
                  " tensors for backward, and more when it was run again.", kDeterminism);
      return false;
    }
    const Traits found(tensor);
    const Traits& expected = traits_[index];
    TORCH_CHECK(found.text() == expected.text(), "tensor ", index,
                " that a checkpointed function saved for backward was ", expected.text(),
                " and is ", found.text(), " when it is run again.", kDeterminism);
    TORCH_CHECK(found == expected, "a parameter of size ", tensor.sizes(),
                " was changed in place between the forward and the backward of a checkpointed "
                "function (an optimizer step before backward?): run backward first.");
    if (const auto slot = slots_[index].lock()) *slot = {value, task};
    return true;
  }
  bool stops_after(size_t count) const { return early_stop_ && count == slots_.size(); }

 private:
  void recompute(int64_t task);

  const bool early_stop_;
  const detail::Recompute recompute_;
  const Surroundings surroundings_;
  const std::unique_ptr<SavedOps> saved_ops_;  // null: of no op
  std::vector<SavedVariable> inputs_;
  std::vector<Traits> traits_;
  std::vector<std::weak_ptr<Slot>> slots_;  // of tensors that some node still has
  std::atomic<bool> forward_done_ = false;
  std::recursive_mutex mutex_;
};

/// Stands for a tensor that was not saved.
struct Dropped final : SavedVariableHooks {
  explicit Dropped(std::shared_ptr<Frame> frame) : frame(std::move(frame)) {}
  void call_pack_hook(const Tensor& tensor) override { frame->expect(tensor, slot); }
  Tensor call_unpack_hook() override { return frame->value_of(*slot); }
  std::shared_ptr<Frame> frame;
  std::shared_ptr<Slot> slot = std::make_shared<Slot>();
};

struct DropAll final : SavedTensorHooks {
  explicit DropAll(std::shared_ptr<Frame> frame) : frame(std::move(frame)) {}
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<Dropped>(frame); }
  std::shared_ptr<Frame> frame;
};

/// Hands the tensors of a recomputation to those who wait for them. The graph that it builds keeps
/// them as well while it lives: the function may run backward itself.
struct HandOver final : SavedTensorHooks {
  HandOver(Frame& frame, int64_t task) : frame(frame), task(task) {}

  struct Kept final : SavedVariableHooks {
    explicit Kept(HandOver& owner) : owner(owner) {}
    void call_pack_hook(const Tensor& tensor) override {
      value = tensor.tensor_data();
      owner.take(tensor, value);
    }
    Tensor call_unpack_hook() override { return value; }
    HandOver& owner;  // alive while tensors are being saved
    Tensor value;
  };
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<Kept>(*this); }
  void take(const Tensor& tensor, const Tensor& value) {
    const bool expected = frame.receive(tensor, value, count++, task);
    incomplete_forward = incomplete_forward || !expected;
    if (expected && frame.stops_after(count)) throw Stop(this);
  }

  Frame& frame;
  int64_t task;
  size_t count = 0;
  bool incomplete_forward = false;
};

/// In the first run: keeps the results of ops.
struct KeepResults final : dispatch::OpMode {
  explicit KeepResults(Frame& frame) : frame(frame) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack* stack) override {
    SavedOps& saved = *frame.saved_ops();
    const bool concerned = saved.concerns(op);
    const bool wanted = concerned && saved.wants(op, *stack);
    const Storages given = wanted ? SavedOps::storages_of_arguments(op, *stack) : Storages();
    proceed(op, keys, stack);
    saved.watch(op, *stack);
    if (concerned) saved.record(op, wanted ? stack : nullptr, given, frame.surroundings());
  }
  Frame& frame;
};

/// In the others: hands them out.
struct UseResults final : dispatch::OpMode {
  explicit UseResults(Frame& frame) : frame(frame) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack* stack) override {
    SavedOps& saved = *frame.saved_ops();
    if (!saved.concerns(op)) return proceed(op, keys, stack);
    const size_t index = counts[op]++;
    const SavedOps::Found found = saved.replay(op, index, *stack);
    if (found == SavedOps::Found::kResults) return;
    TORCH_CHECK(found == SavedOps::Found::kRecompute || !frame.is_forward_done(),
                "a checkpointed function called ", op.operator_name(), " ", index,
                " times, and more often when it was run again.", kDeterminism);
    proceed(op, keys, stack);
  }
  Frame& frame;
  OpCounts counts;
};

void Frame::recompute(int64_t task) {
  const dispatch::OpModeScope unseen(nullptr);
  std::vector<Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
  HandOver hand_over(*this, task);
  try {
    SavedTensorScope saving(&hand_over);
    Surroundings::Restored restored(surroundings_);
    at::AutoGradMode enabled(true);
    UseResults use_results(*this);
    const dispatch::OpModeScope using_results(saved_ops_ ? &use_results : nullptr);
    recompute_(inputs);
  } catch (const Stop& stop) {
    if (stop.who != &hand_over) throw;
  }
  TORCH_CHECK(hand_over.count == slots_.size() || hand_over.incomplete_forward,
              "a checkpointed function saved ", slots_.size(), " tensors for backward, but ",
              hand_over.count, " when it was run again.", kDeterminism);
}

}  // namespace fsdp2::recompute

namespace fsdp2::detail {

struct CheckpointScope::State {
  explicit State(const std::shared_ptr<recompute::Frame>& frame)
      : hooks(frame), scope(&hooks), keep_results(*frame) {
    if (frame->saved_ops()) keeping_results.emplace(&keep_results);
  }
  recompute::DropAll hooks;
  recompute::SavedTensorScope scope;
  recompute::KeepResults keep_results;
  std::optional<dispatch::OpModeScope> keeping_results;
};

CheckpointScope::CheckpointScope(const CheckpointOptions& options,
                                 const std::vector<at::Tensor>& inputs, Recompute recompute)
    : state_(std::make_unique<State>(
          std::make_shared<recompute::Frame>(options, inputs, std::move(recompute)))) {}

CheckpointScope::~CheckpointScope() { state_->hooks.frame->forward_is_done(); }

}  // namespace fsdp2::detail
