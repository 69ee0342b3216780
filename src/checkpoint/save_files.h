#pragma once

// Writing a rank's share of a plan, and making the whole a checkpoint.

#include "checkpoint/save_plan.h"

#include <fsdp2/dcp_metadata.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// One save, from the plan to the commit. What it needs of the state it holds.
struct SaveJob {
  std::string folder;
  int threads = 1;
  std::function<void()> on_complete;
  std::vector<SaveLeaf> leaves;
  std::shared_ptr<const SavePlan> plan;
};

/// Makes the folder, writes, flushes, and commits on the first rank. Collective; an error is raised
/// on all ranks, and then the files of this save are removed and an older checkpoint is untouched.
void run(const SaveJob& job, const Exchange& exchange);

}  // namespace fsdp2::dcp
