#include "cli/commands.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  CLI::App app{"fsdp2: fully sharded training for C++ on libtorch", "fsdp2"};
  app.require_subcommand(1);
  int exit_code = 0;
  std::vector<std::string> program;
  fsdp2::cli::add_run(app, program, exit_code);
  fsdp2::cli::add_train(app, exit_code);
  fsdp2::cli::add_generate(app, exit_code);
  fsdp2::cli::add_plan(app, exit_code);
  fsdp2::cli::add_ckpt(app, exit_code);
  fsdp2::cli::add_bench(app, exit_code);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  program = fsdp2::cli::cut_program(app, arguments);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const c10::Error& error) {
    std::cerr << "fsdp2: " << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "fsdp2: " << error.what() << std::endl;
    return 1;
  }
  return exit_code;
}
