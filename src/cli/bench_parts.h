#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace CLI {
class App;
}
namespace fsdp2::train {
struct GroupCost;
}

namespace fsdp2::cli {

/// The parts of `fsdp2 bench`.
void add_bench_checkpoint(CLI::App& bench);
void add_bench_collectives(CLI::App& bench);
void add_bench_overhead(CLI::App& bench);
void add_bench_scale(CLI::App& bench);

/// --groups, --steps and --json.
void add_group_options(CLI::App& command, std::vector<int64_t>& groups, int64_t& steps,
                       std::string& json);
/// "1 rank", "2 ranks".
std::string rank_count(int ranks);
/// A table of what groups cost: `where`, the names of its columns, then a row for each.
void print_group_heading(const std::string& where);
void print_group_row(const train::GroupCost& cost);
nlohmann::ordered_json group_json(const train::GroupCost& cost);

/// The report as JSON, if there is a path. Error if it cannot be written.
void write_report(const std::string& path, const nlohmann::ordered_json& report);

}  // namespace fsdp2::cli
