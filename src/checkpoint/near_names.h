#pragma once

// Lists of names in messages.

#include <string>
#include <vector>

namespace fsdp2::dcp {

/// "; did you mean model.weight?", with those of `names` that look most like `name`; "" if none
/// does. For the end of a message.
std::string near_names(const std::string& name, const std::vector<std::string>& names);

/// "a, b and 3 more".
std::string short_list(const std::vector<std::string>& names);

}  // namespace fsdp2::dcp
