#include "train/group_overhead.h"

#include <fsdp2/collectives.h>
#include <fsdp2/fully_shard.h>
#include <fsdp2/meta_device.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace fsdp2::train {
namespace {

constexpr int64_t kRows = 4;     // of a batch: compute is as small as it gets
constexpr int64_t kUntimed = 3;  // steps: the first ones find out what follows what

struct ChainImpl : torch::nn::Module {
  ChainImpl(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i) list->push_back(torch::nn::Linear(width, width));
    register_module("list", list);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *list) x = layer->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::ModuleList list;
};
TORCH_MODULE(Chain);

Chain make_chain(const GroupBenchOptions& options, int64_t width) {
  if (!options.meta) return Chain(options.groups, width);
  const MetaDeviceGuard meta;
  return Chain(options.groups, width);
}

double step_us(Chain& chain, const torch::Tensor& x) {
  chain->zero_grad();
  if (get_world_size() > 1) wait(barrier(world_group()));
  const auto start = std::chrono::steady_clock::now();
  chain->forward(x).sum().backward();
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
  return taken.count();
}

/// The median, of all but the first, of what the slowest rank took.
double slowest_median(const std::vector<double>& mine) {
  const torch::Tensor times = torch::tensor(mine, torch::kDouble);
  if (get_world_size() > 1) wait(all_reduce(times, ReduceOp::kMax, world_group()));
  return times.slice(0, kUntimed).median().item<double>();
}

}  // namespace

GroupCost measure_groups(const GroupBenchOptions& options) {
  for (const auto& [name, value] : {std::pair("--groups", options.groups),
                                    {"--bytes", options.bytes},
                                    {"--steps", options.steps}}) {
    TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
  }
  torch::set_num_threads(1);
  const auto width = std::max<int64_t>(
      1, std::llround(std::sqrt(static_cast<double>(options.bytes) / sizeof(float))));
  Chain plain = make_chain(options, width), sharded = make_chain(options, width);
  FullyShardOptions wrap;
  wrap.mesh = init_device_mesh(options.meta ? "meta" : "cpu", {get_world_size()});
  for (const auto& layer : *sharded->list) fully_shard(layer, wrap);
  fully_shard(sharded, wrap);

  const torch::Tensor x =
      torch::ones({kRows, width}, torch::device(options.meta ? torch::kMeta : torch::kCPU));
  std::vector<double> plain_us, sharded_us;
  for (int64_t i = 0; i < kUntimed + options.steps; ++i) {
    plain_us.push_back(step_us(plain, x));
    reset_collective_counts();
    sharded_us.push_back(step_us(sharded, x));
  }
  const int64_t all_gathers = collective_counts().all_gathers;
  return {.groups = options.groups,
          .bytes = (width * width + width) * static_cast<int64_t>(sizeof(float)),
          .ranks = get_world_size(),
          .plain_us = slowest_median(plain_us),
          .sharded_us = slowest_median(sharded_us),
          .all_gathers = all_gathers};
}

}  // namespace fsdp2::train
