#pragma once

// The checkpoints of one run: a folder with one of them a step, the newest of which can be found,
// and old ones of which go.

#include <fsdp2/dcp.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// `root`/step_<N> for each, and a link `root`/latest to the newest complete one, which moves only
/// once that is on the disk. Reading functions are local, others collective as dcp::save.
class Checkpoints {
 public:
  /// Keeps the newest `keep_last` complete ones; 0: all.
  explicit Checkpoints(std::string root, int keep_last = 0);

  void save(const StateDict& state, int64_t step, const SaveOptions& options = {}) const;
  AsyncSave async_save(const StateDict& state, int64_t step, const SaveOptions& options = {}) const;

  std::string folder_of(int64_t step) const;
  /// The steps whose checkpoints are complete, oldest first.
  std::vector<int64_t> steps() const;
  /// The folder to resume from: the newest complete checkpoint; nothing if there is none.
  std::optional<std::string> latest() const;
  /// Removes all complete ones but the newest `keep`, and what unfinished saves left. Returns the
  /// folders that went. To be called when no save is under way.
  std::vector<std::string> prune(int keep) const;

 private:
  SaveOptions with_link(const SaveOptions& options, int64_t step) const;

  std::string root_;
  int keep_last_;
};

}  // namespace fsdp2::dcp
