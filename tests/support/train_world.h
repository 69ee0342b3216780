#pragma once

// The world of a training run, as several processes inside one test.

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/world.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/utils.h>

#include <functional>
#include <string>

namespace fsdp2::testing {

/// Runs `body` on `ranks` processes of one compute thread, in a world that meets in `folder`: once
/// for each number of ranks.
inline void on_world(const TemporaryFolder& folder, int ranks,
                     const std::function<void(const train::World&)>& body) {
  on_processes(ranks, [&](int rank) {
    torch::set_num_threads(1);
    InitOptions options;
    options.rank = rank;
    options.world_size = ranks;
    options.store =
        c10::make_intrusive<c10d::FileStore>(folder.path("store" + std::to_string(ranks)), ranks);
    options.timeout = std::chrono::seconds(30);
    const train::World world(options);
    body(world);
  });
}

}  // namespace fsdp2::testing
