// `fsdp2 bench collectives`: shared memory beside gloo, and beside one pass of memory.

#include "cli/bench_parts.h"
#include "train/world.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

namespace fsdp2::cli {
namespace {

struct CollectivesBench {
  std::vector<int64_t> sizes = {4096, 65536, 1048576, 4194304, 16777216, 67108864};
  std::vector<std::string> dtypes = {"fp32", "bf16"};
  int repeats = 5;
  double seconds = 0.05;  // of each measurement, at least
  std::string json;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of one `body`, over as many of them as `seconds` have, the same number on all ranks.
double time_of(const std::function<void()>& body, double seconds, const ProcessGroup& group) {
  body();
  wait(barrier(group));
  const double once_start = now();
  body();
  std::vector<double> once = {now() - once_start};
  train::sum_over_ranks(once);
  const double mean = once[0] / group->getSize();
  const int64_t count = std::clamp<int64_t>(static_cast<int64_t>(seconds / mean), 1, 20'000);
  wait(barrier(group));
  const double start = now();
  for (int64_t i = 0; i < count; ++i) body();
  return (now() - start) / static_cast<double>(count);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// `what` with a tensor of `bytes`: the gathered one, the one to scatter, or the reduced one.
std::function<void(const ProcessGroup&)> collective(const std::string& what, int64_t bytes,
                                                    at::ScalarType type, int ranks) {
  const auto count = bytes / static_cast<int64_t>(c10::elementSize(type)) / ranks * ranks;
  const torch::Tensor whole = torch::ones({count}, type), part = torch::ones({count / ranks}, type);
  if (what == "all_gather")
    return [=](const ProcessGroup& group) { wait(all_gather_single(whole, part, group)); };
  if (what == "reduce_scatter") {
    return [=](const ProcessGroup& group) {
      wait(reduce_scatter_single(part, whole, ReduceOp::kSum, group));
    };
  }
  whole.zero_();
  return [=](const ProcessGroup& group) { wait(all_reduce(whole, ReduceOp::kSum, group)); };
}

void print(const nlohmann::ordered_json& row, int64_t bytes) {
  std::printf("%-14s %-4s %10lld  %10.1f %10.1f %10.1f  %7.1f  %5.2f\n",
              row.at("collective").get<std::string>().c_str(),
              row.at("dtype").get<std::string>().c_str(), static_cast<long long>(bytes),
              row.at("gloo_us").get<double>(), row.at("shm_us").get<double>(),
              row.at("copy_us").get<double>(), row.at("gloo_over_shm").get<double>(),
              row.at("shm_over_copy").get<double>());
  std::fflush(stdout);
}

void run(const CollectivesBench& arguments) {
  // One world after the other; the groups stay.
  const auto group_over = [](const char* backend) {
    InitOptions options;
    options.backend = backend;
    const train::World world(options);
    return world_group();
  };
  const ProcessGroup gloo = group_over("gloo");
  InitOptions options;
  options.backend = "shm";
  const train::World world(options);
  const ProcessGroup shm = world_group();
  torch::set_num_threads(1);
  if (world.rank() == 0) {
    std::printf("%d ranks; us of one call, medians of %d\n", world.size(), arguments.repeats);
    std::printf("%-14s %-4s %10s  %10s %10s %10s  %7s  %5s\n", "", "", "bytes", "gloo", "shm",
                "memcpy", "gloo/shm", "shm/memcpy");
  }
  nlohmann::ordered_json report = {{"ranks", world.size()},
                                   {"rows", nlohmann::ordered_json::array()}};
  for (const char* what : {"all_gather", "reduce_scatter", "all_reduce"}) {
    for (const std::string& dtype : arguments.dtypes) {
      for (const int64_t bytes : arguments.sizes) {
        const auto body = collective(what, bytes, train::dtype_of(dtype), world.size());
        const auto from = torch::ones({bytes}, at::kByte), to = torch::ones({bytes}, at::kByte);
        std::vector<double> over_gloo, over_shm, copies;
        for (int i = 0; i < arguments.repeats; ++i) {
          over_gloo.push_back(time_of([&] { body(gloo); }, arguments.seconds, shm));
          over_shm.push_back(time_of([&] { body(shm); }, arguments.seconds, shm));
          copies.push_back(
              time_of([&] { std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), bytes); },
                      arguments.seconds, shm));
        }
        const double slow = median(over_gloo), fast = median(over_shm), copy = median(copies);
        report["rows"].push_back({{"collective", what},
                                  {"dtype", dtype},
                                  {"bytes", bytes},
                                  {"gloo_us", slow * 1e6},
                                  {"shm_us", fast * 1e6},
                                  {"copy_us", copy * 1e6},
                                  {"gloo_over_shm", slow / fast},
                                  {"shm_over_copy", fast / copy}});
        if (world.rank() == 0) print(report["rows"].back(), bytes);
      }
    }
  }
  if (world.rank() == 0) write_report(arguments.json, report);
}

}  // namespace

void add_bench_collectives(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "collectives", "All ranks of one host: shared memory, gloo and memcpy in turn");
  const auto arguments = std::make_shared<CollectivesBench>();
  command->add_option("--bytes", arguments->sizes, "Of the largest tensor of a call")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->add_option("--dtypes", arguments->dtypes, "fp32, bf16, fp16")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command->add_option("--repeats", arguments->repeats, "Of each")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--seconds", arguments->seconds, "Of each measurement")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--json", arguments->json, "Write the report");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fsdp2::cli
