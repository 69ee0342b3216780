#pragma once

// Reductions in host memory, one element at a time in order of rank, so that every rank and every
// run gives the same bits.

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdp2::comm {

/// "SUM"
const char* name_of_reduction(c10d::ReduceOp::RedOpType op);

/// Why numbers of this dtype cannot be reduced so; empty if they can.
std::string why_not_reducible(c10::ScalarType type, c10d::ReduceOp::RedOpType op);

/// `output` [bytes] = the reduction of `inputs`, each as long, in their order; it may be one of
/// them. fp16 and bf16 are added in fp32 and rounded once. An average is over `ranks`, 0: over the
/// inputs.
void reduce_in_order(std::byte* output, c10::ArrayRef<const std::byte*> inputs, int64_t bytes,
                     c10::ScalarType type, c10d::ReduceOp::RedOpType op, int64_t ranks = 0);

/// out = (parts[0] + parts[1] + ...) / divisor, as above, of `numel` numbers.
void add_up(std::byte* out, c10::ArrayRef<const std::byte*> parts, int64_t numel,
            c10::ScalarType type, double divisor = 1);

}  // namespace fsdp2::comm
