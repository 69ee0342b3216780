#pragma once

// Traces of a few steps, one a rank and all of them together, that chrome://tracing and Perfetto
// open. libtorch's profiler records them; the library's own ranges are in comm/trace_range.h.

#include "train/world.h"

#include <cstdint>
#include <filesystem>
#include <string>

namespace fsdp2::train {

/// Steps that a trace records when it can, from the first after warm-up.
constexpr int64_t kTracedSteps = 3;

/// On each rank; what it calls collective is so unless `path` is empty, and then nothing happens.
class StepTrace {
 public:
  /// Records `count` steps from `first` on. A `path` that ends with ".json" is the file of all
  /// ranks together; else it is a folder, made if need be, for `trace.json` of all and
  /// `rank_N.json` of each. Ranks of other hosts are in the former only if they see the same
  /// folder. Collective; error on all ranks if one cannot write there.
  StepTrace(const std::string& path, const World& world, int64_t first, int64_t count);
  /// What has been recorded and not written is dropped.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  /// Around each step, on the same thread. end() is collective at the last of the recorded ones.
  void begin(int64_t step);
  void end(int64_t step);
  /// No more steps follow: writes what there is, if anything is recorded and not written.
  /// Collective.
  void finish();

  /// The file of all ranks, once it is written; else empty.
  std::string written() const { return written_ ? whole_.string() : std::string(); }

 private:
  std::filesystem::path part(int rank) const;

  const World& world_;
  const int64_t first_, last_;
  const bool one_file_;
  std::filesystem::path whole_;  // of all ranks; empty: no trace
  bool recording_ = false, written_ = false;
};

}  // namespace fsdp2::train
