#include "train/stop_signal.h"

#include <csignal>

namespace fsdp2::train {
namespace {

volatile std::sig_atomic_t noted = 0;
struct sigaction previous_term, previous_int;

void note(int signal) { noted = signal; }

}  // namespace

StopSignal::StopSignal() {
  noted = 0;
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, &previous_term);
  sigaction(SIGINT, &action, &previous_int);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &previous_term, nullptr);
  sigaction(SIGINT, &previous_int, nullptr);
}

int StopSignal::received() { return noted; }

}  // namespace fsdp2::train
