#pragma once

// How a DTensor lies on one mesh dimension: Shard(dim), Replicate() or Partial(op).
// Follows torch.distributed.tensor.placement_types.

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fsdp2 {

class Placement {
 public:
  enum class Kind { kReplicate, kShard, kPartial };
  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t dim) const { return is_shard() && dim_ == dim; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  /// Of a Shard: the tensor dimension that is split; negative counts from the end until a DTensor
  /// is made.
  int64_t dim() const { return dim_; }
  /// Of a Partial: "sum", "avg", "max", "min", "product" or, of a PartialNorm, "norm".
  const std::string& reduce_op() const { return reduce_op_; }
  /// Of a PartialNorm.
  double norm_order() const { return norm_order_; }

  std::string to_string() const;  // Shard(dim=0), Replicate(), Partial(sum)
  bool operator==(const Placement&) const = default;

 private:
  friend Placement Shard(int64_t dim);
  friend Placement Replicate();
  friend Placement Partial(std::string reduce_op);
  friend Placement PartialNorm(double order);
  Kind kind_ = Kind::kReplicate;
  int64_t dim_ = 0;
  std::string reduce_op_;
  double norm_order_ = 0;
};

using Placements = std::vector<Placement>;

/// Split along `dim` by the chunk rule: ceil(n / ranks) each, so trailing ranks may have less or
/// nothing.
Placement Shard(int64_t dim);
/// The same whole tensor on every rank.
Placement Replicate();
/// A whole tensor on every rank that still has to be reduced over them.
Placement Partial(std::string reduce_op = "sum");
/// What a norm over shards gives: every rank holds the norm of its own part. `order` is finite and
/// not 0.
Placement PartialNorm(double order);

/// The part of a dimension of size `size` that `rank` of `ranks` holds under the chunk rule.
struct Chunk {
  int64_t offset = 0, length = 0;
};
Chunk chunk_of(int64_t size, int64_t ranks, int64_t rank);

std::ostream& operator<<(std::ostream& out, const Placement& placement);
std::string to_string(const Placements& placements);

}  // namespace fsdp2
