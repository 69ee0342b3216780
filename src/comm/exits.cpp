#include "comm/exits.h"

#include "comm/world.h"

#include <fsdp2/process_group.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <pthread.h>

namespace fsdp2::comm {
namespace {

std::atomic<const std::string*> waiting_for = nullptr;
std::atomic<bool> forked = false;
std::terminate_handler outer_handler = nullptr;

[[noreturn]] void on_terminate() {
  if (const std::string* what = waiting_for.load(); what && !what->empty()) {
    std::fprintf(
        stderr,
        "fsdp2: rank %d is ended while it waits in %s. If the cause below comes from gloo: "
        "ranks called collectives of different sizes here, that is, took different "
        "branches.\n",
        is_initialized() ? get_rank() : -1, what->c_str());
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

Waiting::Waiting(const std::string& what) : what_(&what) { waiting_for = what_; }
Waiting::~Waiting() {
  const std::string* ours = what_;
  waiting_for.compare_exchange_strong(ours, nullptr);
}

}  // namespace fsdp2::comm
