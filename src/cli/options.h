#pragma once

#include <string>

namespace CLI {
class App;
}

namespace fsdp2::cli {

/// An option of `command` that takes one value and is given twice keeps the last, as in most
/// programs.
void last_wins(CLI::App& command);

/// --trace: where to write what train::StepTrace records of `steps`, which the help names.
void add_trace_option(CLI::App& command, std::string& path, const std::string& steps);

/// Gives `command` the values in a TOML file (`steps = 100`), except those of options that the
/// command line set. Call it from the command's callback. CLI::ParseError naming the file and the
/// key if there is no such option.
void read_config(CLI::App& command, const std::string& path);

}  // namespace fsdp2::cli
