#pragma once

// Smaller forms in which a parameter's shards can travel, for
// FullyShardOptions::all_gather_extension_fn. Shards, gradients and the optimizer keep their dtype;
// what forward and backward see is the rebuilt value. One object a parameter.
//
//   options.all_gather_extension_fn = [](const torch::Tensor& p) {
//     return p.dim() == 2 ? fsdp2::float8_all_gather() : nullptr;
//   };

#include <fsdp2/custom_comm.h>

#include <cstdint>
#include <memory>

namespace fsdp2 {

/// One byte an element: e4m3 with one scale a rank, the largest magnitude of its shard over 448
/// (arxiv.org/abs/2209.05433). |error| <= max(|x| / 16, scale / 1024).
std::shared_ptr<AllGatherExtension> float8_all_gather();

/// One byte an element: int8 with a float scale for every `block` elements, the block's largest
/// magnitude over 127. |error| <= scale / 2.
std::shared_ptr<AllGatherExtension> int8_all_gather(int64_t block = 128);

/// Half a byte an element: the sixteen levels of NormalFloat4 with a float scale, its largest
/// magnitude, for every `block` elements (QLoRA, arxiv.org/abs/2305.14314). For frozen weights.
/// |error| <= 0.152 scale.
std::shared_ptr<AllGatherExtension> nf4_all_gather(int64_t block = 64);

}  // namespace fsdp2
