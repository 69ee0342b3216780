#include "train/world.h"

#include <fsdp2/collectives.h>

#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <thread>

namespace fsdp2::train {

World::World(const InitOptions& options) {
  init_process_group(options);
  rank_ = get_rank();
  size_ = get_world_size();
}

World::~World() { destroy_process_group(); }

void set_threads(int threads) {
  TORCH_CHECK_VALUE(threads >= 0, "--threads must not be negative, got ", threads);
  if (threads == 0) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) return;
    const char* local = std::getenv("LOCAL_WORLD_SIZE");
    const int ranks = local != nullptr ? std::max(1, std::atoi(local)) : 1;
    threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
  }
  torch::set_num_threads(threads);
}

torch::ScalarType dtype_of(const std::string& name) {
  if (name == "fp32") return torch::kFloat;
  if (name == "bf16") return torch::kBFloat16;
  if (name == "fp16") return torch::kHalf;
  TORCH_CHECK_VALUE(false, "there is no dtype '", name, "': use fp32, bf16 or fp16");
}

MixedPrecisionPolicy precision(const std::string& param_dtype, const std::string& reduce_dtype) {
  MixedPrecisionPolicy policy;
  if (param_dtype != "fp32") policy.param_dtype = dtype_of(param_dtype);
  policy.reduce_dtype = dtype_of(reduce_dtype);
  return policy;
}

void agree(const std::string& what, const std::function<void()>& body) {
  std::string message;
  try {
    body();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (get_world_size() == 1) {
    TORCH_CHECK(message.empty(), what, ": ", message);
    return;
  }
  const auto messages = all_gather_bytes(message, world_group());
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].empty(), what, ": rank ", rank, ": ", messages[rank]);
  }
}

void sum_over_ranks(std::vector<double>& values) {
  if (get_world_size() == 1) return;
  auto sum = torch::tensor(values, torch::TensorOptions(torch::kFloat64)).to(get_device());
  wait(all_reduce(sum, ReduceOp::kSum, world_group()), "sum over ranks");
  sum = sum.cpu();
  values.assign(sum.data_ptr<double>(), sum.data_ptr<double>() + sum.numel());
}

}  // namespace fsdp2::train
