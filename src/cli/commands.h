#pragma once

// The subcommands of the fsdp2 binary. Each adds itself to the CLI11 app and leaves its exit code
// in `exit_code` when it was the one called.

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace fsdp2::cli {

/// Takes the program that `fsdp2 run` is to start, with all that follows, off the end of
/// `arguments` (those of fsdp2, without argv[0]): options there are not ours. Needs add_run. Empty
/// for every other subcommand.
std::vector<std::string> cut_program(const CLI::App& app, std::vector<std::string>& arguments);
/// `program` is read when `run` is called.
void add_run(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_train(CLI::App& app, int& exit_code);
void add_generate(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_ckpt(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);

}  // namespace fsdp2::cli
