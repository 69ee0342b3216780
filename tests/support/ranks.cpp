#include "support/ranks.h"

#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/torch.h>

#include <filesystem>
#include <gtest/gtest.h>
#include <iostream>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace fsdp2::testing {
namespace {

int run_child(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    std::cerr << "threw: " << error.what_without_backtrace() << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "threw: " << error.what() << std::endl;
    return 2;
  }
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace

void on_processes(int count, const std::function<void(int)>& body, std::chrono::seconds limit) {
  std::cout.flush();
  std::cerr.flush();
  std::vector<pid_t> pids;
  for (int index = 0; index < count; ++index) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0) << "fork failed";
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      torch::set_num_threads(1);
      const int code = run_child([&] { body(index); });
      std::cout.flush();
      std::cerr.flush();
      // Without static destructors: a failed rank may hold threads that would wait for ever.
      _exit(code);
    }
    pids.push_back(pid);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  size_t left = pids.size();
  while (left > 0) {
    int status = 0;
    bool ended = false;
    for (size_t i = 0; i < pids.size(); ++i) {
      if (pids[i] == 0 || waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
      pids[i] = 0;
      --left;
      ended = true;
      if (WIFSIGNALED(status)) {
        ADD_FAILURE() << "rank " << i << " died of signal " << WTERMSIG(status) << " ("
                      << strsignal(WTERMSIG(status)) << ")";
      } else {
        EXPECT_EQ(WEXITSTATUS(status), 0)
            << "rank " << i << " of " << count << " failed (its output is above)";
      }
    }
    if (ended) continue;
    if (std::chrono::steady_clock::now() > deadline) {
      for (size_t i = 0; i < pids.size(); ++i) {
        if (pids[i] == 0) continue;
        ADD_FAILURE() << "rank " << i << " still ran after " << limit.count() << " s: a hang";
        kill(pids[i], SIGKILL);
        waitpid(pids[i], &status, 0);
      }
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void on_ranks(int world, const std::function<void(int)>& body, std::chrono::seconds limit) {
  std::string path = (std::filesystem::temp_directory_path() / "fsdp2-test-XXXXXX").string();
  ASSERT_NE(mkdtemp(path.data()), nullptr);
  on_processes(
      world,
      [&](int rank) {
        InitOptions options;
        options.rank = rank;
        options.world_size = world;
        options.store = c10::make_intrusive<c10d::FileStore>(path + "/store", world);
        options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(limit) / 2;
        init_process_group(options);
        body(rank);
        if (!::testing::Test::HasFailure() && is_initialized()) destroy_process_group();
      },
      limit);
  std::filesystem::remove_all(path);
}

}  // namespace fsdp2::testing
