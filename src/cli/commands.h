#pragma once

// The subcommands of the fsdp2 binary. Each adds itself to the CLI11 app and leaves its exit code in `exit_code` when
// it was the one called.

namespace CLI {
class App;
}

namespace fsdp2::cli {

void add_run(CLI::App& app, int& exit_code);

}  // namespace fsdp2::cli
