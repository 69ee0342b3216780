#pragma once

#include "dtensor/spec.h"

#include <vector>

namespace fsdp2::dtensor {

/// Error naming this rank, the given and the expected size, unless `local` is what `size` leaves
/// it. No communication.
void check_local_size(const at::Tensor& local, const Spec& spec, c10::IntArrayRef size);

/// The size that the local parts of all ranks add up to. Collective. An error on every rank, naming
/// the one at fault, if the parts do not follow the chunk rule or differ where they should be
/// equal.
std::vector<int64_t> gather_global_size(const at::Tensor& local, const Spec& spec);

}  // namespace fsdp2::dtensor
