// `fsdp2 bench scale`: how what a step costs above its compute grows with groups and bytes.
// bench/scale.py runs it on 1 to 8 ranks.

#include "cli/bench_parts.h"
#include "train/group_overhead.h"
#include "train/world.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

namespace fsdp2::cli {
namespace {

struct ScaleBench {
  std::vector<int64_t> groups = {4, 8, 16, 32, 64, 96}, bytes = {1024, 65536, 1048576};
  int64_t steps = 20;
  std::string json;
};

void run(const ScaleBench& arguments) {
  const train::World world;
  const bool first = world.rank() == 0;
  if (first) print_group_heading(rank_count(world.size()));
  nlohmann::ordered_json report = {{"ranks", world.size()},
                                   {"rows", nlohmann::ordered_json::array()}};
  for (const int64_t bytes : arguments.bytes) {
    for (const int64_t groups : arguments.groups) {
      const auto cost =
          train::measure_groups({.groups = groups, .bytes = bytes, .steps = arguments.steps});
      report["rows"].push_back(group_json(cost));
      if (first) print_group_row(cost);
    }
  }
  if (first) write_report(arguments.json, report);
}

}  // namespace

void add_bench_scale(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "scale",
      "What a step (forward and backward of square layers, one a parameter group) costs above the\n"
      "same of plain layers, by the number of groups and their bytes; bench/scale.py runs it on\n"
      "several numbers of ranks");
  const auto arguments = std::make_shared<ScaleBench>();
  add_group_options(*command, arguments->groups, arguments->steps, arguments->json);
  command->add_option("--bytes", arguments->bytes, "Of parameters a group")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fsdp2::cli
