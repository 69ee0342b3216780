#include "cli/options.h"

#include <CLI/CLI.hpp>

namespace fsdp2::cli {

void last_wins(CLI::App& command) {
  for (auto* option : command.get_options()) {
    if (option->get_expected_max() <= 1) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
}

void add_trace_option(CLI::App& command, std::string& path, const std::string& steps) {
  command.add_option("--trace", path,
                     "Trace steps " + steps +
                         ": a folder for trace.json (all ranks; open it in ui.perfetto.dev or "
                         "chrome://tracing) and rank_N.json of each, or a FILE.json of all ranks");
}

void read_config(CLI::App& command, const std::string& path) {
  for (const auto& item : CLI::ConfigTOML().from_file(path)) {
    if (item.name == "++" || item.name == "--") continue;  // CLI11's marks around sections
    auto* option = item.parents.empty() ? command.get_option_no_throw("--" + item.name) : nullptr;
    if (option == nullptr || !option->get_configurable()) {
      throw CLI::ConfigError(path + ": there is no option called " + item.fullname(),
                             CLI::ExitCodes::ConfigError);
    }
    if (option->count() > 0) continue;
    option->add_result(item.inputs);
    option->run_callback();
  }
}

}  // namespace fsdp2::cli
