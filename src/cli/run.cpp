#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace fsdp2::cli {

void add_run(CLI::App& app, int&) { app.add_subcommand("run", "Start a program on several ranks"); }

}  // namespace fsdp2::cli
