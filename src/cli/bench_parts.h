#pragma once

namespace CLI {
class App;
}

namespace fsdp2::cli {

/// The parts of `fsdp2 bench`.
void add_bench_checkpoint(CLI::App& bench);
void add_bench_collectives(CLI::App& bench);

}  // namespace fsdp2::cli
