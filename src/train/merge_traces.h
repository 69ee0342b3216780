#pragma once

#include <filesystem>
#include <vector>

namespace fsdp2::train {

/// What libtorch's profiler wrote on a rank.
struct RankTrace {
  int rank = 0;
  std::filesystem::path file;
};

/// Joins traces into one: a process called "rank N" for each, in it a thread each for what the rank
/// was doing ("step": the program's ranges; "gather", "reduce", "wait", "optimizer": the library's,
/// as comm/trace_range.h names them) and below these the threads as they were recorded. Times stay:
/// clocks of ranks on one host agree. Error naming the file that cannot be read or written.
void merge_traces(const std::vector<RankTrace>& traces, const std::filesystem::path& out);

}  // namespace fsdp2::train
