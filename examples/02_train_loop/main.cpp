// A training loop as one would write it: wrapped blocks, accumulated and clipped gradients, a
// schedule, validation over all ranks, and whole weights in a safetensors file at the end.
//
//   fsdp2 run -n 2 -- ./02_train_loop weights.safetensors

#include <fsdp2/collectives.h>
#include <fsdp2/fsdp2.h>
#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <cmath>
#include <iostream>

namespace {

/// A residual block. It is a plain module: nothing in it knows that it will be sharded.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl(int64_t inputs, int64_t width, int64_t depth, int64_t classes) {
    embed = register_module("embed", torch::nn::Linear(inputs, width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
    head = register_module("head", torch::nn::Linear(width, classes));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = embed(x);
    for (const auto& block : *blocks) h = block->as<Block>()->forward(h);
    return head(h);
  }

  torch::nn::Linear embed{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Classifier);

constexpr int64_t kInputs = 8, kClasses = 5, kBatch = 32, kMicroBatches = 2, kSteps = 150;

/// Points, and the class that their angle falls into.
std::pair<torch::Tensor, torch::Tensor> batch(uint64_t seed) {
  torch::manual_seed(seed);
  const auto x = torch::randn({kBatch, kInputs});
  const auto angle = torch::atan2(x.select(1, 0), x.select(1, 1)) / M_PI * 0.5 + 0.5;
  return {x, (angle * kClasses).to(torch::kInt64).clamp(0, kClasses - 1)};
}

double validation_accuracy(Classifier& model) {
  const torch::NoGradGuard no_grad;
  const auto [x, y] = batch(1'000'000 + fsdp2::get_rank());
  auto right = (model->forward(x).argmax(1) == y).to(torch::kFloat64).mean();
  fsdp2::wait(fsdp2::all_reduce(right, fsdp2::ReduceOp::kAvg, fsdp2::world_group()));
  return right.item<double>();
}

/// Every rank takes part in gathering, one tensor after another; rank 0 writes.
void save(const Classifier& model, const std::string& path) {
  std::vector<fsdp2::safetensors::Entry> entries;
  for (const auto& item : model->named_parameters()) {
    entries.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
  }
  std::optional<fsdp2::safetensors::Writer> writer;
  if (fsdp2::get_rank() == 0) writer.emplace(path, entries);
  for (const auto& item : model->named_parameters()) {
    const auto whole = fsdp2::DTensor(item.value()).full_tensor();
    if (writer) writer->write(whole);
  }
  if (writer) writer->commit();
}

}  // namespace

int main(int argc, char** argv) {
  fsdp2::init_process_group();
  torch::manual_seed(0);
  Classifier model(kInputs, 48, 3, kClasses);
  for (const auto& block : *model->blocks) fsdp2::fully_shard(block);
  fsdp2::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions().weight_decay(0.01));

  const int world = fsdp2::get_world_size(), rank = fsdp2::get_rank();
  for (int64_t step = 0; step < kSteps; ++step) {
    const double lr = 3e-3 * 0.5 * (1 + std::cos(M_PI * step / kSteps));
    for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
    for (int64_t k = 0; k < kMicroBatches; ++k) {
      const auto [x, y] = batch((step * kMicroBatches + k) * world + rank);
      (torch::cross_entropy_loss(model->forward(x), y) / kMicroBatches).backward();
    }
    const double norm =
        torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);  // over all ranks
    optimizer.step();
    optimizer.zero_grad();
    if (step % 25 == 24) {
      const double accuracy = validation_accuracy(model);
      if (rank == 0)
        std::cout << "step " << step + 1 << " accuracy " << accuracy << " grad norm " << norm
                  << "\n";
    }
  }
  if (argc > 1) save(model, argv[1]);
  fsdp2::destroy_process_group();
}
