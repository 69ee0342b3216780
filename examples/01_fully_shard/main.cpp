// The smallest sharded training: an MLP learns to add its inputs.
//
//   fsdp2 run -n 2 -- ./01_fully_shard

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <iostream>

int main() {
  fsdp2::init_process_group();  // from the environment that `fsdp2 run` or torchrun sets
  torch::manual_seed(0);        // the same initial weights on every rank

  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 1));
  fsdp2::fully_shard(model[2]);  // the middle layer as a group of its own
  fsdp2::fully_shard(model);     // and the rest

  // After fully_shard: parameters() are shards now.
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));

  torch::manual_seed(1 + fsdp2::get_rank());  // other data on every rank
  for (int step = 0; step <= 200; ++step) {
    const auto x = torch::randn({32, 16});
    const auto loss = torch::mse_loss(model->forward(x), x.sum(1, /*keepdim=*/true));
    optimizer.zero_grad();
    loss.backward();  // gradients are averaged over the ranks
    optimizer.step();
    if (step % 50 == 0 && fsdp2::get_rank() == 0)
      std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }

  const fsdp2::DTensor weight(model->parameters()[0]);
  std::cout << "of a weight " << weight.sizes() << " this rank holds " << weight.to_local().sizes()
            << "\n";
  fsdp2::destroy_process_group();
}
