#include "comm/exits.h"

#include "comm/world.h"

#include <fsdp2/process_group.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <pthread.h>

namespace fsdp2::comm {
namespace {

std::mutex doing_mutex;
char doing_now[256] = "";  // no string: read while the process ends
std::atomic<bool> forked = false;
std::terminate_handler outer_handler = nullptr;

[[noreturn]] void on_terminate() {
  if (doing_now[0] != '\0') {
    std::fprintf(stderr,
                 "fsdp2: rank %d is ended in %s. If the cause comes from gloo: ranks called "
                 "collectives of different sizes here, that is, took different branches.\n",
                 is_initialized() ? get_rank() : -1, doing_now);
  }
  if (outer_handler) outer_handler();
  std::abort();
}

}  // namespace

void watch_exits() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      if (is_initialized() && get_world_size() > 1) forked = true;
    });
    outer_handler = std::set_terminate(on_terminate);
  });
}

bool forked_from_a_rank() { return forked; }

void check_not_forked(const std::string& what) {
  TORCH_CHECK(!forked, what,
              ": this process was forked from that rank, whose connections it does not have: fork "
              "before init_process_group, or start a new program");
}

void note_doing(const std::string& doing) {
  const std::lock_guard lock(doing_mutex);
  const size_t length = doing.copy(doing_now, sizeof doing_now - 1);
  doing_now[length] = '\0';
}

}  // namespace fsdp2::comm
