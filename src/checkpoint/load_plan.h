#pragma once

// What a load has to read, worked out and checked before anything is written.

#include "checkpoint/archive.h"
#include "checkpoint/blocks.h"
#include "checkpoint/checksums.h"
#include "checkpoint/flatten.h"
#include "checkpoint/storage.h"

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
  const files::Readable& at(const std::string& name);

 private:
  std::string folder_;
  std::map<std::string, std::unique_ptr<files::Readable>> files_;
};

/// Elements to be copied from a stored block to this rank's part of a tensor.
struct ReadTask {
  const files::Readable* file = nullptr;
  StoredTensor stored;
  Block from;          // what the stored block holds
  torch::Tensor data;  // where it goes
  Block to;            // what `data` holds
};

/// A checkpoint whose metadata has been read, and whose files are opened when they are needed.
struct OpenCheckpoint {
  explicit OpenCheckpoint(const std::string& folder);

  std::vector<std::string> keys() const;

  std::string folder;
  Metadata metadata;
  OpenFiles files;
};

struct LoadPlan {
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

/// Reads every needed item's header. Local; throws on whatever is wrong. Missing keys are left to
/// the caller. The plan is good as long as the checkpoint.
LoadPlan plan_load(StateDict& state, OpenCheckpoint& checkpoint, const LoadOptions& options);

/// Runs the tasks. Thread-safe files; `threads` at once.
void run(const std::vector<ReadTask>& tasks, int threads);

/// All of what is under `entry`'s key.
Value read_entry(const StoredEntry& entry, OpenCheckpoint& checkpoint);

/// Error naming the file if the item's bytes are not those that were saved.
void check_item(const files::Readable& file, const Place& place, const Checksums& checksums);

}  // namespace fsdp2::dcp
