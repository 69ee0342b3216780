#pragma once

// The tables of rules, one a family of ops. A name covers all overloads unless it has a dot.

#include "dtensor/call.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp2::dtensor {

struct NamedRule {
  std::string name;  // without "aten::"
  Rule rule;
};
using RuleTable = std::vector<NamedRule>;

/// One rule for all of `names`, which spaces separate; with `in_place_too` also for each with a '_'
/// behind it.
void add_rules(RuleTable& table, Rule rule, std::string_view names, bool in_place_too = false);

RuleTable pointwise_rules();
RuleTable copy_rules();
RuleTable view_rules();
RuleTable factory_rules();
RuleTable reduction_rules();
RuleTable stacking_rules();
RuleTable foreach_rules();
RuleTable random_rules();
RuleTable agreement_rules();
RuleTable whole_value_rules();

/// What set_data asks, which is no op with a kernel of its own.
void register_set_data();

}  // namespace fsdp2::dtensor
