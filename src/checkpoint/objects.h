#pragma once

// Plain Python values in pickles.

#include "checkpoint/pickle_reader.h"
#include "checkpoint/pickle_writer.h"

#include <fsdp2/dcp_value.h>

#include <functional>
#include <string>
#include <string_view>

namespace fsdp2::dcp {

/// Makes a tensor of the node that stands for one.
using TensorReader = std::function<torch::Tensor(const pickle::Node& node)>;
/// Throws pickle::Unsupported, naming the class, if C++ has no counterpart. Tensors are not
/// supported without `tensors`.
Value value_of(const pickle::Tree& tree, const TensorReader& tensors = {});

using TensorWriter = std::function<void(const torch::Tensor& tensor, pickle::Writer& out)>;
/// Everything but Pickled and Stateful, which are errors; as are tensors without `tensors`.
void write_value(const Value& value, pickle::Writer& out, const TensorWriter& tensors = {});

std::string to_pickle(const Value& value);
Value from_pickle(std::string_view bytes);

}  // namespace fsdp2::dcp
