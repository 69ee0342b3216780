#include "checkpoint/blocks.h"

#include "dtensor/tensor_impl.h"

#include <fsdp2/dtensor.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace fsdp2::dcp {

int64_t Block::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

Block block_of(const torch::Tensor& tensor) {
  Block block{std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0), tensor.sizes().vec()};
  if (!is_dtensor(tensor)) return block;
  const dtensor::Spec& spec = *dtensor::spec_of(tensor);
  TORCH_CHECK_VALUE(!spec.partial, "its values are partial sums, ", to_string(spec.placements),
                    ": redistribute it to Shard or Replicate first");
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const Chunk part = dtensor::part_along(spec, spec.coordinate, dim, tensor.size(dim));
    block.offsets[static_cast<size_t>(dim)] = part.offset;
    block.sizes[static_cast<size_t>(dim)] = part.length;
  }
  return block;
}

torch::Tensor data_of(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? dtensor::local_of(tensor) : tensor.detach();
}

bool is_plain(const torch::Tensor& tensor) {
  const auto backend = tensor.unsafeGetTensorImpl()->key_set().highestBackendKey();
  return (backend == c10::BackendComponent::CPUBit || backend == c10::BackendComponent::CUDABit) &&
         !tensor.is_conj() && !tensor.is_neg();
}

std::vector<Block> split(const Block& block, int64_t elements) {
  const auto outermost =
      std::find_if(block.sizes.begin(), block.sizes.end(), [](int64_t size) { return size > 1; });
  const int64_t all = block.numel();
  if (all <= elements || outermost == block.sizes.end()) return {block};
  const auto dim = static_cast<size_t>(outermost - block.sizes.begin());
  const int64_t step = std::max<int64_t>(1, elements / (all / *outermost));
  std::vector<Block> pieces;
  for (int64_t at = 0; at < *outermost; at += step) {
    Block piece = block;
    piece.offsets[dim] += at;
    piece.sizes[dim] = std::min(step, *outermost - at);
    for (Block& part : split(piece, elements)) pieces.push_back(std::move(part));
  }
  return pieces;
}

Block intersection(const Block& a, const Block& b) {
  Block both = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    both.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    both.sizes[d] = std::max<int64_t>(0, end - both.offsets[d]);
  }
  return both;
}

torch::Tensor view_of(const torch::Tensor& data, const Block& all, const Block& part) {
  torch::Tensor view = data;
  for (size_t d = 0; d < all.sizes.size(); ++d) {
    if (part.sizes[d] == all.sizes[d]) continue;
    view = view.narrow(static_cast<int64_t>(d), part.offsets[d] - all.offsets[d], part.sizes[d]);
  }
  return view;
}

}  // namespace fsdp2::dcp
