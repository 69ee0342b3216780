// Where every op on a DTensor arrives: finds its rule and runs it.

#include "dtensor/call.h"
#include "dtensor/mirror.h"
#include "dtensor/rules.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>

#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>

namespace fsdp2 {
namespace dtensor {
namespace {

using Rules = std::unordered_map<std::string, Rule>;

Rules build_rules() {
  Rules rules;
  for (const RuleTable& table : {pointwise_rules(), copy_rules(), view_rules(), factory_rules(),
                                 reduction_rules(), stacking_rules(), foreach_rules(),
                                 random_rules(), agreement_rules(), whole_value_rules()}) {
    for (const NamedRule& entry : table) {
      const bool fresh = rules.emplace("aten::" + entry.name, entry.rule).second;
      TORCH_INTERNAL_ASSERT(fresh, "two DTensor rules for ", entry.name);
    }
  }
  return rules;
}

/// Rules by the schema's address, which lives as long as the op; filled once, so reads take no
/// lock.
class RuleCache {
 public:
  RuleCache() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (op && op->hasSchema()) rules_[&op->schema()] = find_rule(name);
    }
  }
  Rule find(const c10::OperatorHandle& op) const {
    const auto entry = rules_.find(&op.schema());
    return entry == rules_.end() ? find_rule(op.operator_name()) : entry->second;
  }

 private:
  ska::flat_hash_map<const c10::FunctionSchema*, Rule> rules_;
};

const RuleCache* cache = nullptr;

void run_rule(Call& call) {
  if (const Rule rule = cache->find(call.op)) return rule(call);
  if (run_replicated(call)) return;
  at::Tensor first;
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t) {
    if (!first.defined() && is_dtensor(tensor)) first = tensor;
    return std::optional<at::Tensor>();
  });
  call.refuse(first, "this op has no rule for shards");
}

/// What is written back from one view may not undo what the same op wrote elsewhere.
void check_apart(Call& call) {
  std::vector<at::Tensor> targets;
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
    if (is_dtensor(tensor) && call.info.written[index]) targets.push_back(tensor);
    return std::optional<at::Tensor>();
  });
  for (const at::Tensor& a : targets) {
    for (const at::Tensor& b : targets) {
      if (impl_of(a)->writes == impl_of(b)->writes && impl_of(a)->mirror != impl_of(b)->mirror) {
        call.refuse(a, "one op would write a tensor and a view of its elements on several ranks");
      }
    }
  }
}

void below(const c10::OperatorHandle& op, const dispatch::OpInfo& info, c10::DispatchKeySet,
           torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call{op, info, *stack};
  const bool records = c10::GradMode::is_enabled();
  std::vector<std::shared_ptr<Mirror>> written;
  dispatch::map_arguments(info, *stack, [&](const at::Tensor& tensor, size_t index) {
    if (is_dtensor(tensor)) {
      if (records) convert_gradients_of(tensor);
      if (const auto& mirror = impl_of(tensor)->mirror) {
        update(*mirror);
        if (info.written[index]) written.push_back(mirror);
      }
    }
    return std::optional<at::Tensor>();
  });
  if (!written.empty()) check_apart(call);
  run_rule(call);
  for (const auto& mirror : written) write_back(*mirror);
}

}  // namespace

std::optional<size_t> Call::find(const char* name) const {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return i;
  }
  return std::nullopt;
}

void Call::finish(c10::IValue result) {
  torch::jit::drop(stack, info.arguments);
  stack.push_back(std::move(result));
}

void Call::finish_nothing() { torch::jit::drop(stack, info.arguments); }

std::string Call::name() const { return c10::toString(op.operator_name()); }

void Call::refuse(const at::Tensor& dtensor, const std::string& why) const {
  std::ostringstream out;
  out << name() << " on a DTensor";
  if (is_dtensor(dtensor)) {
    out << " of size " << dtensor.sizes() << " laid out as "
        << to_string(spec_of(dtensor)->placements);
  }
  out << ": " << why
      << ". Take the whole tensor with full_tensor(), this rank's part with to_local(), "
      << "or change the layout with redistribute()";
  if (is_dtensor(dtensor) && has_write_observer(dtensor)) {
    out << ". A parameter of a module wrapped by fully_shard: in forward use the module's member, "
           "which gathers itself, not parameters()";
  }
  const std::string op_name = name();
  const auto names = [&](const char* part) { return op_name.find(part) != std::string::npos; };
  if (names("rnn") || names("lstm") || names("gru")) {
    out << ". A recurrent module reads its parameters anew in to(): call that before fully_shard";
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, out.str());
  std::abort();
}

void add_rules(RuleTable& table, Rule rule, std::string_view names, bool in_place_too) {
  std::istringstream words{std::string(names)};
  for (std::string name; words >> name;) {
    table.push_back({name, rule});
    if (in_place_too) table.push_back({name + "_", rule});
  }
}

Rule find_rule(const c10::OperatorName& name) {
  static const Rules rules = build_rules();
  auto entry = rules.find(name.name + "." + name.overload_name);
  if (entry == rules.end()) entry = rules.find(name.name);
  return entry == rules.end() ? nullptr : entry->second;
}

}  // namespace dtensor

void register_dtensor() {
  static std::once_flag once;
  std::call_once(once, [] {
    dispatch::Interception interception;
    interception.bit = c10::BackendComponent::PrivateUse2Bit;
    interception.below = &dtensor::below;
    dtensor::cache = new dtensor::RuleCache;
    dispatch::intercept(interception);
    dtensor::register_set_data();
  });
}

}  // namespace fsdp2
