// `fsdp2 bench overhead`: what the library costs the host, apart from bytes.

#include "cli/bench_parts.h"
#include "train/group_overhead.h"
#include "train/op_overhead.h"
#include "train/world.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

namespace fsdp2::cli {
namespace {

using OverheadJson = nlohmann::ordered_json;

struct OverheadBench {
  std::vector<int64_t> groups = {4, 8, 16, 32, 64, 96};
  int64_t steps = 20, repeats = 15;
  int simulated = 1024;
  std::string json;
};

OverheadJson ops_part(const OverheadBench& arguments, bool prints) {
  const auto costs = train::measure_ops(arguments.repeats);
  OverheadJson rows = OverheadJson::array();
  if (prints) std::printf("%-40s %10s %10s %10s\n", "ns an op", "plain", "ours", "added");
  for (const auto& cost : costs) {
    rows.push_back({{"op", cost.op}, {"plain_ns", cost.plain_ns}, {"ours_ns", cost.ours_ns}});
    if (!prints) continue;
    std::printf("%-40s %10.0f %10.0f %10.0f\n", cost.op.c_str(), cost.plain_ns, cost.ours_ns,
                cost.added_ns());
  }
  return rows;
}

OverheadJson groups_part(const OverheadBench& arguments, bool meta, const std::string& where,
                         bool prints) {
  OverheadJson rows = OverheadJson::array();
  if (prints) std::printf("\n");
  if (prints) print_group_heading(where);
  for (const int64_t groups : arguments.groups) {
    const auto cost =
        train::measure_groups({.groups = groups, .steps = arguments.steps, .meta = meta});
    rows.push_back(group_json(cost));
    if (prints) print_group_row(cost);
  }
  return rows;
}

void run(const OverheadBench& arguments) {
  OverheadJson report;
  bool first = true;
  {
    const train::World world;
    first = world.rank() == 0;
    report["ops"] = ops_part(arguments, first);
    report["groups"] = groups_part(arguments, false, rank_count(world.size()), first);
  }
  if (!first) return;
  if (arguments.simulated > 1) {
    InitOptions options;
    options.backend = "fake";
    options.rank = 0;
    options.world_size = arguments.simulated;
    const train::World world(options);
    const std::string where = "one of " + rank_count(arguments.simulated) + ", simulated";
    report["simulated"] = groups_part(arguments, false, where, true);
    report["simulated_by_size"] = groups_part(arguments, true, where + ", no bytes", true);
  }
  write_report(arguments.json, report);
}

}  // namespace

void add_bench_overhead(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "overhead",
      "What the library costs the host apart from bytes: an op, and a parameter group of a step\n"
      "(forward and backward of tiny layers, less the same of plain ones), on the ranks it is run\n"
      "with and on one of many simulated ranks, where nothing is sent");
  const auto arguments = std::make_shared<OverheadBench>();
  add_group_options(*command, arguments->groups, arguments->steps, arguments->json);
  command->add_option("--repeats", arguments->repeats, "Batches of each op")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--simulated-ranks", arguments->simulated, "In the simulated world; 0: none")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fsdp2::cli
