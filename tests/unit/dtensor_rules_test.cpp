#include "dtensor/rules.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <set>
#include <string>

namespace fsdp2::dtensor {
namespace {

TEST(DTensorRules, NameOpsThatArriveAtTheKernel) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::set<std::string> arriving;  // with and without overload
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      arriving.insert(name.name);
      arriving.insert(name.name + "." + name.overload_name);
    }
  }
  std::set<std::string> seen;
  for (const RuleTable& table : {pointwise_rules(), copy_rules(), view_rules(), factory_rules(),
                                 reduction_rules(), stacking_rules(), foreach_rules(),
                                 random_rules(), agreement_rules(), whole_value_rules()}) {
    for (const NamedRule& rule : table) {
      const std::string name = "aten::" + rule.name;
      EXPECT_TRUE(arriving.count(name)) << name << " is no op with a kernel of its own";
      EXPECT_TRUE(seen.insert(name).second) << name << " has two rules";
    }
  }
}

}  // namespace
}  // namespace fsdp2::dtensor
