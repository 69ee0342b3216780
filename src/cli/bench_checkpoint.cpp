// `fsdp2 bench checkpoint`: what saving and loading costs, beside a plain write to the same disk.

#include "cli/bench_parts.h"
#include "cli/commands.h"
#include "train/world.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dcp.h>
#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <unistd.h>

namespace fsdp2::cli {
namespace {

namespace fs = std::filesystem;

struct CheckpointBench {
  std::string folder, only;
  double gib = 1;
  int threads = 0;
  int repeats = 3;
};

/// Parameters of `gib` GiB in all, with Adam's two moments: 16 MiB each, as a transformer's are.
dcp::StateDict make_state(double gib, const DeviceMesh& mesh, bool values) {
  const auto count = static_cast<int64_t>(gib * 64);
  dcp::StateDict state;
  for (int64_t i = 0; i < count; ++i) {
    const std::string name = "layers." + std::to_string(i) + ".weight";
    const auto sharded = [&](double value) {
      const int64_t rows = chunk_of(2048, mesh.size(), mesh.get_local_rank()).length;
      torch::Tensor local = torch::full({rows, 2048}, value);
      if (values) local.normal_();
      return DTensor::from_local(local, mesh, {Shard(0)}, std::vector<int64_t>{2048, 2048});
    };
    state["model"][name] = sharded(0);
    state["optim"]["state"][name]["exp_avg"] = sharded(1);
    state["optim"]["state"][name]["exp_avg_sq"] = sharded(2);
  }
  return state;
}

/// Seconds that `body` takes on all ranks together.
double seconds(const std::function<void()>& body) {
  wait(barrier(world_group()));
  const auto start = std::chrono::steady_clock::now();
  body();
  wait(barrier(world_group()));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The system's cache keeps nothing of these files: a load then comes from the disk.
void forget(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

/// One half alone, so that one number of ranks can load what another has saved.
void run_half(const CheckpointBench& arguments, const train::World& world, const DeviceMesh& mesh,
              const std::string& folder) {
  const bool saves = arguments.only == "save";
  dcp::StateDict state = make_state(arguments.gib, mesh, saves);
  nlohmann::ordered_json report = {{"ranks", world.size()}, {"gib", 3 * arguments.gib}};
  for (int i = 0; i < arguments.repeats; ++i) {
    if (!saves && world.rank() == 0) forget(folder);
    report[arguments.only].push_back(seconds([&] {
      if (saves) {
        dcp::save(state, folder, {.threads = arguments.threads});
      } else {
        dcp::load(state, folder, {.threads = arguments.threads});
      }
    }));
  }
  if (world.rank() == 0) std::cout << report.dump() << std::endl;
}

void run(const CheckpointBench& arguments) {
  const train::World world;
  const DeviceMesh mesh = init_device_mesh("cpu", {world.size()}, {"shard"});
  const std::string folder = (fs::path(arguments.folder) / "bench").string();
  if (!arguments.only.empty()) return run_half(arguments, world, mesh, folder);
  const dcp::StateDict state = make_state(arguments.gib, mesh, true);
  dcp::StateDict target = make_state(arguments.gib, mesh, false);
  const dcp::SaveOptions options{.threads = arguments.threads};
  nlohmann::ordered_json report = {{"ranks", world.size()}, {"gib", 3 * arguments.gib}};
  for (const char* what : {"save", "load", "load_cached", "async_blocked", "async_save"}) {
    report[what] = nlohmann::json::array();
  }
  const auto clean = [&] {
    if (world.rank() == 0) fs::remove_all(folder);
  };
  for (int i = 0; i < arguments.repeats; ++i) {
    clean();
    report["save"].push_back(seconds([&] { dcp::save(state, folder, options); }));
    if (world.rank() == 0) forget(folder);
    for (const char* what : {"load", "load_cached"}) {
      report[what].push_back(
          seconds([&] { dcp::load(target, folder, {.threads = arguments.threads}); }));
    }
    clean();
    dcp::AsyncSave saving;
    report["async_save"].push_back(seconds([&] {
      report["async_blocked"].push_back(
          seconds([&] { saving = dcp::async_save(state, folder, options); }));
      saving.wait();
    }));
  }
  dcp::finish_async_saves();
  clean();
  if (world.rank() == 0) std::cout << report.dump() << std::endl;
}

}  // namespace

void add_bench_checkpoint(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "checkpoint", "Save and load a model with Adam's state; print the seconds as JSON");
  const auto arguments = std::make_shared<CheckpointBench>();
  command->add_option("folder", arguments->folder, "On the disk to measure")
      ->required()
      ->check(CLI::ExistingDirectory);
  command->add_option("--gib", arguments->gib, "Of parameters; the state is three times that")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--threads", arguments->threads, "A rank; 0: the cores shared by the ranks")
      ->capture_default_str();
  command->add_option("--repeats", arguments->repeats, "Of each")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--only", arguments->only, "Save and leave it there, or load what is there")
      ->check(CLI::IsMember({"save", "load"}));
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fsdp2::cli
