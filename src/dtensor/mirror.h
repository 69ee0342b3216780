#pragma once

// Views that no rank holds a part of: `view({-1})` of a shard, `select` along the sharded
// dimension. They are views of a whole copy, which follows its tensor: brought up to date before an
// op reads it (collective if the tensor was written), and written back after an op wrote to it.

#include "dtensor/call.h"

#include <memory>

namespace fsdp2::dtensor {

struct Mirror {
  at::Tensor base;  // an alias of the tensor that is seen
  at::Tensor whole;
  int64_t seen = 0;     // the writes to `base` that `whole` shows
  int64_t version = 0;  // of its local part then
};

/// Runs a view op on the whole of its first argument; results are Replicate.
void view_of_whole(Call& call);
/// The same for a view of this size.
void view_of_whole(Call& call, c10::IntArrayRef sizes);

/// Before an op reads or writes any view of it. Error if the tensor was written around its ops
/// since the last of them, through to_local(): other ranks need not know.
void update(Mirror& mirror);
/// After an op wrote to a view of it.
void write_back(Mirror& mirror);
/// Error if what is seen cannot be written.
void check_writable(const Mirror& mirror);
/// For what reads a tensor without an op.
inline void update(const at::Tensor& tensor) {
  if (impl_of(tensor)->mirror) update(*impl_of(tensor)->mirror);
}

}  // namespace fsdp2::dtensor
