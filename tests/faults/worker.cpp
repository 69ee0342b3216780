// A rank for the tests of the launcher: all-reduces in a loop, and one rank does something on the
// way.
//   fault_worker sum                   a few all-reduces, prints the result, ends
//   fault_worker early RANK            the same, but the other ranks end a second later
//   fault_worker ACTION RANK           all-reduces until killed; RANK does ACTION after a while:
//                                      exit, throw, kill, segv, or none

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

namespace {

float all_reduced_ranks() {
  auto sum = torch::full({5}, static_cast<float>(fsdp2::get_rank()));
  fsdp2::wait(fsdp2::all_reduce(sum, fsdp2::ReduceOp::kSum, fsdp2::world_group()));
  return sum.sum().item<float>();
}

void act(const std::string& action) {
  if (action == "exit") {
    std::cerr << "this rank leaves with 3" << std::endl;
    _exit(3);
  }
  if (action == "throw") throw std::runtime_error("this rank gives up");
  if (action == "kill") raise(SIGKILL);
  if (action == "segv") raise(SIGSEGV);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string action = argc > 1 ? argv[1] : "sum";
  const int actor = argc > 2 ? std::atoi(argv[2]) : -1;
  fsdp2::init_process_group();
  const int rank = fsdp2::get_rank();
  std::cout << "pid " << getpid() << " of rank " << rank << " of " << fsdp2::get_world_size()
            << std::endl;
  const bool ends = action == "sum" || action == "early";
  for (int step = 0; step < 20 || !ends; ++step) {
    const float sum = all_reduced_ranks();
    if (step == 0) std::cout << "sum " << sum << std::endl;
    if (step == 10 && rank == actor) act(action);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (action == "early" && rank != actor) std::this_thread::sleep_for(std::chrono::seconds(1));
  fsdp2::destroy_process_group();
  return 0;
}
