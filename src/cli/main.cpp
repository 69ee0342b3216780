#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"fsdp2: fully sharded training for C++ on libtorch"};
  app.require_subcommand(1);
  int exit_code = 0;
  fsdp2::cli::add_run(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "fsdp2: " << error.what() << std::endl;
    return 1;
  }
  return exit_code;
}
