// A small training program for tests that need one of another process: run under `fsdp2 run`.
//
//   checkpoint_worker MESH IN OUT STEPS
//   checkpoint_worker copy IN OUT
//
// MESH is "shard" or "2x2". Loads the checkpoint IN ("-": starts anew), saves it to OUT ("-": does
// not), trains STEPS steps and prints, on rank 0, the losses as JSON. The same model, data and
// options as tests/parity/dcp_parity.py. `copy` loads all that IN has, each tensor sharded over the
// ranks, and saves that to OUT.

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear fc1{5, 7}, fc2{7, 3}, low{3, 3};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({7})};

  NetImpl() {
    register_module("fc1", fc1);
    register_module("norm", norm);
    register_module("fc2", fc2);
    register_module("low", low);
    register_buffer("seen", torch::tensor(int64_t{5}));
    low->to(torch::kBFloat16);
    torch::NoGradGuard no_grad;
    int64_t salt = 0;
    for (torch::Tensor& parameter : parameters()) {
      const auto at = torch::arange(parameter.numel(), torch::kFloat32) + 7 * salt++;
      parameter.copy_((torch::remainder(at * 37, 101) / 101 - 0.5).reshape(parameter.sizes()));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = fc2(norm(torch::relu(fc1(x))));
    return y + low(y.to(torch::kBFloat16)).to(torch::kFloat32);
  }
};
TORCH_MODULE(Net);

void copy(const std::string& in, const std::string& out) {
  const auto mesh = fsdp2::init_device_mesh("cpu", {fsdp2::get_world_size()}, {"shard"});
  fsdp2::dcp::StateDict state;
  for (const auto& entry : fsdp2::dcp::read_metadata(in).entries) {
    fsdp2::dcp::Value wanted;  // None: whatever there is
    if (entry.is_tensor) {
      const auto whole = torch::zeros(entry.sizes, entry.dtype);
      wanted = entry.sizes.empty()
                   ? whole
                   : torch::Tensor(fsdp2::distribute_tensor(whole, mesh, {fsdp2::Shard(0)}));
    }
    fsdp2::dcp::Value* place = &state[std::get<std::string>(entry.path.at(0))];
    for (size_t i = 1; i < entry.path.size(); ++i) {
      place = &(*place)[std::get<std::string>(entry.path[i])];
    }
    *place = std::move(wanted);
  }
  fsdp2::dcp::load(state, in);
  fsdp2::dcp::save(state, out);
  fsdp2::destroy_process_group();
}

}  // namespace

int main(int count, char** arguments) try {
  const bool copies = count == 4 && std::string(arguments[1]) == "copy";
  if (count != 5 && !copies) {
    std::cerr << "usage: checkpoint_worker shard|2x2 IN|- OUT|- STEPS\n"
              << "       checkpoint_worker copy IN OUT\n";
    return 2;
  }
  const std::string layout = arguments[1], in = arguments[2], out = arguments[3];
  fsdp2::init_process_group();
  if (copies) {
    copy(in, out);
    return 0;
  }
  const int ranks = fsdp2::get_world_size();
  const auto mesh = layout == "2x2" ? fsdp2::init_device_mesh("cpu", {2, 2}, {"replicate", "shard"})
                                    : fsdp2::init_device_mesh("cpu", {ranks}, {"shard"});
  Net net;
  for (const auto& block : net->children()) fsdp2::fully_shard(block, {.mesh = mesh});
  fsdp2::fully_shard(net, {.mesh = mesh});

  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : net->parameters()) {
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  const auto options = torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).weight_decay(0.1);
  auto without_decay = options;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(options));
  groups.emplace_back(vectors,
                      std::make_unique<torch::optim::AdamWOptions>(without_decay.weight_decay(0)));
  torch::optim::AdamW optimizer(groups, options);

  fsdp2::dcp::StateDict state = {{"train", fsdp2::training_state(net.ptr(), optimizer)},
                                 {"epoch", 0},
                                 {"name", "new"},
                                 {"history", fsdp2::dcp::List()}};
  if (in != "-") fsdp2::dcp::load(state, in);
  if (out != "-") fsdp2::dcp::save(state, out);

  const auto x = torch::arange(40, torch::kFloat32).reshape({8, 5}) / 40 - 0.5;
  const auto target = x.narrow(1, 0, 3).square();
  std::string losses;
  for (int step = 0; step < std::stoi(arguments[4]); ++step) {
    optimizer.zero_grad();
    const auto loss = (net->forward(x) - target).square().mean();
    loss.backward();
    optimizer.step();
    char text[64];
    std::snprintf(text, sizeof(text), "%s%.9g", step == 0 ? "" : ", ", loss.item<double>());
    losses += text;
  }
  if (fsdp2::get_rank() == 0) std::cout << "[" << losses << "]" << std::endl;
  fsdp2::destroy_process_group();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
