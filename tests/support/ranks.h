#pragma once

// Several ranks as real processes inside one test.

#include <chrono>
#include <functional>

namespace fsdp2::testing {

/// Forks `world` processes, joins them into a world over a file store, and runs `body(rank)`
/// in each. The test fails if a rank fails an expectation, throws, dies or is still running after
/// `limit` (then all are killed). Each process has one compute thread. Nothing that `body` does is
/// visible to the caller.
void on_ranks(int world, const std::function<void(int rank)>& body,
              std::chrono::seconds limit = std::chrono::seconds(60));

/// The same without joining them: for tests of initialisation and of exits. A rank is to leave with
/// `exit_codes[rank]` if given, else 0.
void on_processes(int count, const std::function<void(int index)>& body,
                  std::chrono::seconds limit = std::chrono::seconds(60));

}  // namespace fsdp2::testing
