#pragma once

// Results of ops that a checkpointed call keeps: seen in its first run, handed out in the others.

#include "dispatch/op_mode.h"
#include "recompute/surroundings.h"

#include <fsdp2/activation_checkpoint.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fsdp2::recompute {

/// How often each op ran in one run. What names a call is its op and this number.
using OpCounts = std::unordered_map<c10::OperatorHandle, size_t>;

using Storages = std::unordered_set<const c10::StorageImpl*>;

class SavedOps {
 public:
  /// Null if the options keep nothing. Error if an op of the list cannot be kept.
  static std::unique_ptr<SavedOps> make(const CheckpointOptions& options);
  SavedOps(CheckpointPolicyFn policy, std::unordered_set<c10::OperatorHandle> list)
      : policy_(std::move(policy)), list_(std::move(list)) {}

  /// Whether the policy is asked about calls of this op.
  bool concerns(const c10::OperatorHandle& op) const;
  bool wants(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) const;

  static Storages storages_of_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  /// The next call of an op in the first run, and its results (on top of the stack) if they are
  /// kept. Random numbers then go on in other runs as they did after it. Results that lie in
  /// arguments are not kept.
  void record(const c10::OperatorHandle& op, torch::jit::Stack* results, const Storages& arguments,
              const Surroundings& surroundings);
  /// Any op of the first run has left its results on the stack. Some lie in kept memory without
  /// saying so (aten::_unsafe_view): writes through them do not show in what is kept.
  void watch(const c10::OperatorHandle& op, torch::jit::Stack& results);

  enum class Found { kResults, kRecompute, kUnknown };
  /// Call number `index` of an op: replaces its arguments on the stack by what was kept of it.
  /// Results that were written to since are to be computed again.
  Found replay(const c10::OperatorHandle& op, size_t index, torch::jit::Stack& stack);

 private:
  using Versions = std::vector<std::pair<at::Tensor, uint32_t>>;
  struct Results {
    std::vector<c10::IValue> values;
    Versions versions;
    std::unique_ptr<Surroundings> after;  // of an op that draws random numbers
  };

  const CheckpointPolicyFn policy_;
  const std::unordered_set<c10::OperatorHandle> list_;
  bool unchanged(const Versions& versions) const;

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Versions> kept_;  // and who else lies there
  std::unordered_map<c10::OperatorHandle, std::vector<std::optional<Results>>> calls_;
};

}  // namespace fsdp2::recompute
