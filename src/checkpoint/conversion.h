#pragma once

#include <torch/types.h>

namespace fsdp2::dcp {

enum class Conversion { kNone, kExact, kRounding, kImpossible };

/// What it means to load values of one dtype into a tensor of another. Exact: every value has its
/// like. Impossible: floats into integers, complex numbers into real ones,
/// numbers into bools or into integers that may be too small for them.
Conversion conversion(torch::ScalarType from, torch::ScalarType to);

}  // namespace fsdp2::dcp
