#pragma once

#include "dispatch/intercept.h"

namespace fsdp2::fsdp {

/// Runs an op that writes to members, or to views of them, on the shards instead: a member as a
/// whole stands for its shard; of a view, the whole values are gathered, written, and cut again. In
/// the dtype of the shards. Below autograd; collective as an op on the shards would be.
void write_to_shards(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                     torch::jit::Stack& stack);

}  // namespace fsdp2::fsdp
