#pragma once

#include <ATen/core/function_schema.h>

#include <cstdint>

namespace fsdp2::fsdp {

/// What an op does with a gathered parameter that its schema does not say.
enum OpTrait : uint32_t {
  /// Looks at sizes, dtype and device only: no need to gather.
  kSizesOnly = 1,
  /// Writes, or lets others write, to tensors that its schema declares unwritten.
  kHiddenWrite = 2,
  /// Its result keeps the argument's memory inside an object that cannot carry our bit (a sparse
  /// tensor): give it a copy.
  kOpaqueAlias = 4,
  /// Declared to write, but does not.
  kNoWrite = 8,
  /// Composite, and reads data before it dispatches any further.
  kReadsEarly = 16,
  /// Writes to the arguments named running_*, which its schema declares unwritten.
  kWritesRunningStatistics = 32,
  /// Writes what depends on this rank's data: never to a parameter.
  kWritesByData = 64,
  /// Composite, and computes in a wider dtype inside: what meets the parameter there stays as it
  /// is.
  kComputesWider = 128,
};

uint32_t op_traits(const c10::FunctionSchema& schema);

}  // namespace fsdp2::fsdp
