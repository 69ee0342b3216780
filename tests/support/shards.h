#pragma once

#include <fsdp2/fsdp2.h>

namespace fsdp2::testing {

/// `tensor`, the same on all ranks, split along its first dimension over the world.
inline torch::Tensor sharded(const torch::Tensor& tensor) {
  return chunk_tensor(tensor, init_device_mesh("cpu", {get_world_size()}), {Shard(0)});
}

}  // namespace fsdp2::testing
