#pragma once

// Models too large to build on one device: construct without memory, shard, give each rank memory
// for its part, then initialise or load.
//
//   Llama model = [&] { fsdp2::MetaDeviceGuard meta; return Llama(config); }();
//   for (auto& block : *model->blocks) fsdp2::fully_shard(block);
//   fsdp2::fully_shard(model);
//   fsdp2::to_empty(*model, device);
//   fsdp2::init_weights(*model, [](torch::nn::Module& m) {          // or load a checkpoint
//     if (auto* linear = m.as<torch::nn::Linear>()) linear->reset_parameters();
//   });
//
// Follows torch.device("meta"), torch.nn.Module.to_empty and what FSDP2's users do with them
// (pytorch.org/docs/stable/meta.html). Not thread-safe but for the guard, which is per thread.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace fsdp2 {

/// While it lives, every op of this thread that makes a tensor from sizes alone makes it on the
/// meta device: sizes and dtype without memory. torch::tensor({1, 2}) and from_blob, which have
/// values, do not.
class MetaDeviceGuard {
 public:
  MetaDeviceGuard();
  ~MetaDeviceGuard();
  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Gives parameters and buffers below `module` that are on the meta device uninitialised memory on
/// `device`: whole for plain tensors, this rank's part for sharded parameters. Tensors that have
/// memory keep it and their values. Until a parameter is written, using it is an error that names
/// it; likewise the first use of a wrapped module while a buffer is unwritten. Error, before
/// anything changes, if a parameter was sharded for another device.
void to_empty(torch::nn::Module& module, c10::Device device);

/// Calls `init` for every module below and including `module`, in the order of modules(), with
/// autograd off and the default generators seeded alike on all ranks; they are put back at the end.
/// What `init` writes to a member goes to its shards. With the same seed the whole weights are the
/// same at every number of ranks, and those of the plain module initialised by the same function
/// after torch::manual_seed(seed). No more than one whole parameter exists at a time. Without
/// `seed` one is drawn from rank 0's default generator. Collective over the meshes of the wrapped
/// modules.
void init_weights(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init,
                  std::optional<uint64_t> seed = std::nullopt);

}  // namespace fsdp2
