#include "cli/bench_parts.h"

#include "train/group_overhead.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace fsdp2::cli {

void add_group_options(CLI::App& command, std::vector<int64_t>& groups, int64_t& steps,
                       std::string& json) {
  command.add_option("--groups", groups, "Parameter groups of a model, one layer each")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command.add_option("--steps", steps, "Timed steps of each model")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command.add_option("--json", json, "Write the report");
}

std::string rank_count(int ranks) {
  return std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
}

void print_group_heading(const std::string& where) {
  std::printf("%s\n%8s %10s %12s %12s %12s %14s\n", where.c_str(), "groups", "bytes each",
              "plain, us", "sharded, us", "added, us", "us a group");
}

void print_group_row(const train::GroupCost& cost) {
  std::printf("%8lld %10lld %12.1f %12.1f %12.1f %14.2f\n", static_cast<long long>(cost.groups),
              static_cast<long long>(cost.bytes), cost.plain_us, cost.sharded_us,
              cost.overhead_us(), cost.group_us());
  std::fflush(stdout);
}

nlohmann::ordered_json group_json(const train::GroupCost& cost) {
  return {{"groups", cost.groups},         {"bytes", cost.bytes},
          {"ranks", cost.ranks},           {"plain_us", cost.plain_us},
          {"sharded_us", cost.sharded_us}, {"overhead_us", cost.overhead_us()},
          {"group_us", cost.group_us()},   {"all_gathers", cost.all_gathers}};
}

void write_report(const std::string& path, const nlohmann::ordered_json& report) {
  if (path.empty()) return;
  std::ofstream file(path);
  file << report.dump(1) << std::endl;
  if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace fsdp2::cli
