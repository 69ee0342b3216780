// What tests/parity/hf_parity.py has a rank do, under `fsdp2 run`:
//
//   hf_worker IN BATCH LOGITS OUT DTYPE MOST STEPS
//
// Loads the Hugging Face folder IN sharded over all ranks and writes to LOGITS what it makes of the
// tensor `x` in the safetensors file BATCH. Then takes STEPS steps of SGD, in which a rank has
// every world-th row of `x` and `y`, and prints the losses over all rows as JSON. Writes the model
// to OUT, in files of MOST bytes.

#include "train/model_dir.h"
#include "train/world.h"

#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

int main(int count, char** arguments) try {
  if (count != 8) {
    std::cerr << "usage: hf_worker IN BATCH LOGITS OUT DTYPE MOST STEPS\n";
    return 2;
  }
  using namespace fsdp2;
  const train::World world;
  torch::set_num_threads(1);
  train::Llama model = train::load_model(arguments[1], train::ShardingOptions{});
  const safetensors::Reader batch(arguments[2]);
  const auto x = batch.read("x"), y = batch.read("y");
  {
    const torch::NoGradGuard no_grad;
    const auto logits = model->forward(x);
    if (world.rank() == 0) safetensors::save(arguments[3], {{"logits", logits}});
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  nlohmann::json losses = nlohmann::json::array();
  for (int step = 0; step < std::stoi(arguments[7]); ++step) {
    const auto mine = torch::arange(world.rank(), x.size(0), world.size());
    const auto loss =
        train::next_token_loss(model, x.index_select(0, mine), y.index_select(0, mine));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    std::vector<double> sum{loss.item<double>()};
    train::sum_over_ranks(sum);
    losses.push_back(sum[0] / world.size());
  }
  if (world.rank() == 0) std::cout << losses << std::endl;
  std::filesystem::create_directories(arguments[4]);
  train::save_model(model, arguments[4],
                    {.dtype = train::dtype_of(arguments[5]),
                     .most_bytes = std::stoull(arguments[6]),
                     .fields = train::read_hf_config(arguments[1])});
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
