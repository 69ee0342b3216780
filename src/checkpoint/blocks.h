#pragma once

// Which block of a tensor a rank holds, and where blocks meet.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace fsdp2::dcp {

struct Block {
  std::vector<int64_t> offsets, sizes;

  int64_t numel() const;
  bool operator==(const Block&) const = default;
  auto operator<=>(const Block&) const = default;
};

/// What this rank holds of `tensor`: of a plain one, all.
Block block_of(const torch::Tensor& tensor);
/// The tensor that holds these elements: the local part of a DTensor, else the tensor itself.
torch::Tensor data_of(const torch::Tensor& tensor);

/// Whether its bytes may be read and written as they are, without asking anyone.
bool is_plain(const torch::Tensor& tensor);

/// `block` in pieces of at most `elements`, contiguous in a row-major block; at least one.
std::vector<Block> split(const Block& block, int64_t elements);
/// Where both are; empty (numel 0) where they are apart.
Block intersection(const Block& a, const Block& b);
/// The part of `data`, which holds `all`, that holds `part`: a view.
torch::Tensor view_of(const torch::Tensor& data, const Block& all, const Block& part);

}  // namespace fsdp2::dcp
