#include "cli/commands.h"
#include "launch/launch.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <memory>

namespace fsdp2::cli {
namespace {

constexpr const char* kExplanation =
    R"(To call it: fsdp2 run [OPTIONS] [--] PROGRAM [ARGUMENTS...]
Everything after PROGRAM belongs to it. Each rank finds torchrun's variables in its
environment: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...,
and OMP_NUM_THREADS (the cores divided by the ranks) unless you set it. With several ranks,
each line of output has '[rank N]' in front; with one there is nothing in front. Ranks have
nothing on stdin.

When a rank fails, the others get SIGTERM, then SIGKILL, and the message names the rank that
failed first, why, and what it last wrote to stderr. No process is left behind.

Examples:
  fsdp2 run -n 2 ./train --steps 100            two ranks on this host
  fsdp2 run -n 2 -- ./train --steps 100         the same
  fsdp2 run -n 2 python3 train.py               any program that torchrun could start
  fsdp2 run -n 8 --nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 ./train
                                                the second of two hosts; on the first: --node-rank 0

Exit codes:
  0        every rank left with 0
  1..255   that of the rank which failed first; 128 + N if signal N killed it
  128 + N  the launcher was told to stop by signal N (130: Ctrl-C, 143: SIGTERM)
  2        wrong options, or the port is in use: nothing was started
  126/127  PROGRAM cannot be executed / was not found: nothing was started)";

struct RunOptions : launch::LaunchOptions {
  int port = 0;
  double grace_seconds = 0;
};

}  // namespace

std::vector<std::string> cut_program(const CLI::App& app, std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "run") return {};
  const CLI::App* run = app.get_subcommand("run");
  size_t i = 1;
  while (i < arguments.size() && arguments[i].rfind('-', 0) == 0 && arguments[i] != "--") {
    const CLI::Option* option = run->get_option_no_throw(arguments[i]);
    const bool value_follows = option != nullptr && option->get_items_expected_min() > 0;
    i += value_follows ? 2 : 1;
  }
  const size_t end = std::min(i, arguments.size());
  const size_t begin = end < arguments.size() && arguments[end] == "--" ? end + 1 : end;
  std::vector<std::string> program(arguments.begin() + static_cast<std::ptrdiff_t>(begin),
                                   arguments.end());
  arguments.resize(end);
  return program;
}

void add_run(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  CLI::App* run = app.add_subcommand("run", "Start a program on several ranks and watch over it");
  run->footer(kExplanation);
  auto options = std::make_shared<RunOptions>();
  run->add_option("-n,--nproc-per-node,--nproc_per_node", options->processes,
                  "Ranks on this host (default: 1)");
  run->add_option("--nnodes", options->nodes, "Hosts (default: 1)");
  run->add_option("--node-rank,--node_rank", options->node_rank,
                  "Which of the hosts this is (default: 0)");
  run->add_option("--master-addr,--master_addr", options->master_addr,
                  "Host of rank 0 (default: 127.0.0.1)");
  const CLI::Option* port = run->add_option("--master-port,--master_port", options->port,
                                            "Port on which rank 0 listens (default: a free one)");
  const CLI::Option* grace =
      run->add_option(
             "--grace", options->grace_seconds,
             "Seconds from SIGTERM to SIGKILL (default: 5 after a rank failed, 30 after a signal)")
          ->check(CLI::NonNegativeNumber);
  const auto ignored = [](int64_t) {};
  run->add_flag_function("--standalone", ignored, "One host; as it is without --nnodes");
  run->add_flag_function("--no-python,--no_python", ignored,
                         "Accepted as torchrun's; no program is taken for a Python file");
  run->callback([options, port, grace, &program, &exit_code] {
    options->command = program;
    if (port->count() > 0) options->master_port = options->port;
    if (grace->count() > 0) {
      options->grace =
          std::chrono::milliseconds(static_cast<int64_t>(options->grace_seconds * 1000));
    }
    try {
      exit_code = launch::launch(*options);
    } catch (const launch::LaunchError& error) {
      std::cerr << "fsdp2 run: " << error.what() << std::endl;
      exit_code = error.exit_code;
    }
  });
}

}  // namespace fsdp2::cli
