#pragma once

// What a load has to read, worked out and checked before anything is written.

#include "checkpoint/archive.h"
#include "checkpoint/blocks.h"
#include "checkpoint/checksums.h"
#include "checkpoint/file_io.h"
#include "checkpoint/flatten.h"

#include <fsdp2/dcp.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// The files of a checkpoint, each opened once.
class OpenFiles {
 public:
  explicit OpenFiles(std::string folder) : folder_(std::move(folder)) {}
  /// Error naming the file if it is not there.
  const files::ReadFile& at(const std::string& name);

 private:
  std::string folder_;
  std::map<std::string, std::unique_ptr<files::ReadFile>> files_;
};

/// Elements to be copied from a stored block to this rank's part of a tensor.
struct ReadTask {
  const files::ReadFile* file = nullptr;
  StoredTensor stored;
  Block from;          // what the stored block holds
  torch::Tensor data;  // where it goes
  Block to;            // what `data` holds
};

struct LoadPlan {
  Metadata metadata;
  std::unique_ptr<OpenFiles> files;
  std::vector<ReadTask> tasks;
  std::vector<torch::Tensor> written;  // whole tensors that tasks write
  struct Assignment {
    Value* to;
    Value value;
  };
  std::vector<Assignment> values;  // to be assigned at the end
  LoadReport report;               // of this rank
  int64_t found = 0;               // of the keys asked for
};

/// Reads the metadata and every item's header. Local; throws on whatever is wrong. Missing keys are
/// left to the caller.
LoadPlan plan_load(StateDict& state, const std::string& folder, const LoadOptions& options);
/// With the folder's metadata, if it has been read already.
LoadPlan plan_load(StateDict& state, const std::string& folder, Metadata metadata,
                   const LoadOptions& options);

/// Runs the tasks. Thread-safe files; `threads` at once.
void run(const std::vector<ReadTask>& tasks, int threads);

/// Error naming the file if the item's bytes are not those that were saved.
void check_item(const files::ReadFile& file, const Place& place, const Checksums& checksums);

}  // namespace fsdp2::dcp
