#include "recompute/saved_ops.h"

#include "dispatch/intercept.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <map>

namespace fsdp2::recompute {
namespace {

using c10::DispatchKey;
using c10::OperatorHandle;

/// Results of other ops are their arguments, or lie in them.
bool makes_results(const OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  const auto& arguments = op.schema().arguments();
  const auto aliases = [](const c10::Argument& value) { return value.alias_info() != nullptr; };
  return !returns.empty() && std::none_of(returns.begin(), returns.end(), aliases) &&
         std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
           return argument.alias_info() && argument.alias_info()->isWrite();
         });
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool runs_as_itself(const OperatorHandle& op) {
  return !op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(DispatchKey::CUDA) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
}

/// "aten::sum": all overloads whose results can be kept; "aten::sum.dim_IntList": one.
std::vector<OperatorHandle> find_ops(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<OperatorHandle> named, found;
  for (const c10::OperatorName& known : dispatcher.getAllOpNames()) {
    const bool meant = known.name == name || (known.name.size() < name.size() &&
                                              name == known.name + "." + known.overload_name);
    const auto op = meant ? dispatcher.findSchema(known) : std::nullopt;
    if (op) named.push_back(*op);
  }
  TORCH_CHECK_VALUE(!named.empty(), "checkpoint: there is no op '", name,
                    "' for op_list: write it as \"aten::mm\" or, with an overload, as "
                    "\"aten::sum.dim_IntList\"");
  std::copy_if(named.begin(), named.end(), std::back_inserter(found), makes_results);
  TORCH_CHECK_VALUE(!found.empty(), "checkpoint: op_list names '", name,
                    "', whose results are its arguments or views of them: nothing can be kept");
  std::erase_if(found, [](const OperatorHandle& op) { return !runs_as_itself(op); });
  TORCH_CHECK_VALUE(!found.empty(), "checkpoint: op_list names '", name,
                    "', which only calls other ops and so is never seen: name those that it calls "
                    "(for aten::linear: aten::addmm, aten::mm)");
  return found;
}

/// Of all names ever asked for: searching takes longer than a checkpointed call may.
std::vector<OperatorHandle> known_ops(const std::string& name) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::vector<OperatorHandle>>;
  const std::lock_guard lock(mutex);
  const auto found = known->find(name);
  return found != known->end() ? found->second : known->emplace(name, find_ops(name)).first->second;
}

}  // namespace

std::unique_ptr<SavedOps> SavedOps::make(const CheckpointOptions& options) {
  if (options.op_list.empty() && !options.policy_fn) return nullptr;
  TORCH_CHECK_VALUE(options.op_list.empty() || !options.policy_fn,
                    "checkpoint: give op_list or policy_fn, not both");
  std::unordered_set<OperatorHandle> list;
  for (const std::string& name : options.op_list) {
    const auto ops = known_ops(name);
    list.insert(ops.begin(), ops.end());
  }
  return std::make_unique<SavedOps>(options.policy_fn, std::move(list));
}

bool SavedOps::concerns(const OperatorHandle& op) const {
  return policy_ ? makes_results(op) : list_.count(op) != 0;
}

bool SavedOps::wants(const OperatorHandle& op, const torch::jit::Stack& stack) const {
  if (!policy_) return true;
  const size_t count = op.schema().arguments().size();
  const CheckpointPolicy policy =
      policy_({op.schema(), at::ArrayRef<c10::IValue>(stack).slice(stack.size() - count, count)});
  return policy == CheckpointPolicy::kMustSave || policy == CheckpointPolicy::kPreferSave;
}

Storages SavedOps::storages_of_arguments(const OperatorHandle& op, torch::jit::Stack& stack) {
  Storages found;
  dispatch::map_arguments(dispatch::OpInfo(op.schema()), stack,
                          [&](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
                            if (const auto* storage = storage_of(tensor)) found.insert(storage);
                            return std::nullopt;
                          });
  return found;
}

void SavedOps::record(const OperatorHandle& op, torch::jit::Stack* results,
                      const Storages& arguments, const Surroundings& surroundings) {
  std::optional<Results> kept;
  if (results) {
    const dispatch::OpInfo info(op.schema());
    kept.emplace();
    kept->values.assign(results->end() - static_cast<std::ptrdiff_t>(info.returns), results->end());
    bool countable = true;  // whether they are written to can be told
    // Not the tensors themselves, which autograd makes part of the graph that keeps this.
    dispatch::map_returns(info, kept->values, [&](const at::Tensor& tensor) {
      countable = countable && !tensor.is_inference() && !arguments.count(storage_of(tensor));
      const at::Tensor bare = tensor.tensor_data();
      if (countable) kept->versions.emplace_back(bare, bare._version());
      return std::optional(bare);
    });
    if (!countable) kept.reset();
  }
  if (kept && op.hasTag(at::Tag::nondeterministic_seeded)) kept->after = surroundings.of_now();
  const std::lock_guard lock(mutex_);
  if (kept) {
    for (const auto& [tensor, version] : kept->versions) {
      if (const auto* storage = storage_of(tensor)) kept_[storage];
    }
  }
  calls_[op].push_back(std::move(kept));
}

void SavedOps::watch(const OperatorHandle& op, torch::jit::Stack& results) {
  const std::lock_guard lock(mutex_);
  if (kept_.empty()) return;
  dispatch::map_returns(dispatch::OpInfo(op.schema()), results,
                        [&](const at::Tensor& tensor) -> std::optional<at::Tensor> {
                          const auto found = kept_.find(storage_of(tensor));
                          if (found == kept_.end() || tensor.is_inference()) return std::nullopt;
                          const at::Tensor bare = tensor.tensor_data();
                          found->second.emplace_back(bare, bare._version());
                          return std::nullopt;
                        });
}

bool SavedOps::unchanged(const Versions& versions) const {
  const auto same = [](const auto& one) { return one.first._version() == one.second; };
  return std::all_of(versions.begin(), versions.end(), [&](const auto& one) {
    const auto others = kept_.find(storage_of(one.first));
    return same(one) && (others == kept_.end() ||
                         std::all_of(others->second.begin(), others->second.end(), same));
  });
}

SavedOps::Found SavedOps::replay(const OperatorHandle& op, size_t index, torch::jit::Stack& stack) {
  const std::lock_guard lock(mutex_);
  auto& calls = calls_[op];
  if (index >= calls.size()) return Found::kUnknown;
  const std::optional<Results>& call = calls[index];
  if (!call) return Found::kRecompute;
  const Results& kept = *call;
  if (!unchanged(kept.versions)) return Found::kRecompute;
  const dispatch::OpInfo info(op.schema());
  torch::jit::drop(stack, info.arguments);
  stack.insert(stack.end(), kept.values.begin(), kept.values.end());
  dispatch::map_returns(info, stack, [](const at::Tensor& tensor) {
    return std::optional<at::Tensor>(tensor.tensor_data());
  });
  if (kept.after) kept.after->restore();
  return Found::kResults;
}

}  // namespace fsdp2::recompute
