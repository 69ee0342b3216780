// What an op costs on a gathered parameter, and an optimizer step on DTensors, beside the same on
// plain tensors.

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>

namespace {

torch::nn::Linear make_linear(bool sharded) {
  torch::set_num_threads(1);
  torch::nn::Linear linear(8, 8);
  if (sharded) fsdp2::fully_shard(linear);
  return linear;
}

void linear_forward(benchmark::State& state, bool sharded, bool gradients) {
  torch::nn::Linear linear = make_linear(sharded);
  torch::Tensor x = torch::randn({4, 8});
  torch::AutoGradMode mode(gradients);
  for (auto _ : state) benchmark::DoNotOptimize(linear(x));
}
BENCHMARK_CAPTURE(linear_forward, plain_with_gradients, false, true);
BENCHMARK_CAPTURE(linear_forward, gathered_with_gradients, true, true);
BENCHMARK_CAPTURE(linear_forward, plain_no_grad, false, false);
BENCHMARK_CAPTURE(linear_forward, gathered_no_grad, true, false);

void matmul(benchmark::State& state, bool sharded) {
  torch::nn::Linear linear = make_linear(sharded);
  torch::Tensor x = torch::randn({4, 8});
  torch::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(at::mm(x, linear->weight));
}
BENCHMARK_CAPTURE(matmul, plain, false);
BENCHMARK_CAPTURE(matmul, gathered, true);

void view(benchmark::State& state, bool sharded) {
  torch::nn::Linear linear = make_linear(sharded);
  torch::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(linear->weight.t());
}
BENCHMARK_CAPTURE(view, plain, false);
BENCHMARK_CAPTURE(view, gathered, true);

void pointwise(benchmark::State& state, bool sharded) {
  torch::nn::Linear linear = make_linear(sharded);
  torch::Tensor weight = linear->parameters()[0].detach();
  for (auto _ : state) benchmark::DoNotOptimize(weight.mul_(1.0));
}
BENCHMARK_CAPTURE(pointwise, plain, false);
BENCHMARK_CAPTURE(pointwise, dtensor, true);

void adamw_step(benchmark::State& state, bool sharded) {
  torch::nn::Linear linear = make_linear(sharded);
  torch::optim::AdamW optimizer(linear->parameters(), torch::optim::AdamWOptions(1e-3));
  linear(torch::randn({4, 8})).sum().backward();
  for (auto _ : state) optimizer.step();
}
BENCHMARK_CAPTURE(adamw_step, plain, false);
BENCHMARK_CAPTURE(adamw_step, dtensor, true);

}  // namespace
