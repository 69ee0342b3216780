#pragma once

// The tables of rules, one a family of ops. A name covers all overloads unless it has a dot.

#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/call.h"

namespace fsdp2::dtensor {

struct NamedRule {
  std::string_view name;  // without "aten::"
  Rule rule;
};
using RuleTable = std::vector<NamedRule>;

RuleTable pointwise_rules();
RuleTable copy_rules();
RuleTable view_rules();
RuleTable factory_rules();
RuleTable reduction_rules();
RuleTable stacking_rules();
RuleTable foreach_rules();
RuleTable random_rules();
RuleTable agreement_rules();

}  // namespace fsdp2::dtensor
