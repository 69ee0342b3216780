#include "train/op_overhead.h"

#include <fsdp2/fully_shard.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>

namespace fsdp2::train {
namespace {

using Call = std::function<void()>;

constexpr int kCalls = 2000;  // a batch

double batch_ns(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / kCalls;
}

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

OpCost compare(const std::string& op, int64_t repeats, const Call& plain, const Call& ours) {
  batch_ns(plain);
  batch_ns(ours);
  std::vector<double> plain_ns, ours_ns;
  for (int64_t i = 0; i < repeats; ++i) {
    plain_ns.push_back(batch_ns(plain));
    ours_ns.push_back(batch_ns(ours));
  }
  return {op, middle(plain_ns), middle(ours_ns)};
}

double alone(int64_t repeats, const Call& call) {
  return compare("", repeats, call, [] {}).plain_ns;
}

}  // namespace

std::vector<OpCost> measure_ops(int64_t repeats) {
  TORCH_CHECK_VALUE(repeats >= 1, "--repeats must be at least 1, got ", repeats);
  torch::set_num_threads(1);
  const torch::Tensor x = torch::randn({4, 8}), y = torch::randn({4, 8});
  const Call untouched = [&] { x + y; };
  const double before = alone(repeats, untouched);

  torch::nn::Linear plain(8, 8), gathered(8, 8);
  fully_shard(gathered);
  as_fsdp(*gathered).unshard();
  const torch::Tensor shard = gathered->parameters()[0].detach();
  const torch::Tensor tensor = torch::randn(8);

  std::vector<OpCost> costs;
  costs.push_back(compare(
      "Linear forward, 2 gathered parameters", repeats, [&] { plain(x); }, [&] { gathered(x); }));
  const torch::NoGradGuard no_grad;
  costs.push_back(compare("the same, no_grad", repeats, [&] { plain(x); }, [&] { gathered(x); }));
  costs.push_back(compare(
      "mm, 1 gathered parameter, no_grad", repeats, [&] { torch::mm(x, plain->weight); },
      [&] { torch::mm(x, gathered->weight); }));
  costs.push_back(compare(
      "mul_ of a shard (DTensor)", repeats, [&] { tensor.mul_(1.0); }, [&] { shard.mul_(1.0); }));
  costs.push_back({"add of two plain tensors", before, alone(repeats, untouched)});
  as_fsdp(*gathered).reshard();
  return costs;
}

}  // namespace fsdp2::train
