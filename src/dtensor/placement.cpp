#include <fsdp2/placement.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <ostream>
#include <sstream>
#include <string_view>

namespace fsdp2 {

Placement Shard(int64_t dim) {
  Placement placement;
  placement.kind_ = Placement::Kind::kShard;
  placement.dim_ = dim;
  return placement;
}

Placement Replicate() { return Placement(); }

Placement Partial(std::string reduce_op) {
  constexpr std::array<std::string_view, 5> known = {"sum", "avg", "max", "min", "product"};
  TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), reduce_op) != known.end(), "Partial(\"",
                    reduce_op, "\"): the reduction must be sum, avg, max, min or product");
  Placement placement;
  placement.kind_ = Placement::Kind::kPartial;
  placement.reduce_op_ = std::move(reduce_op);
  return placement;
}

Placement PartialNorm(double order) {
  Placement placement;
  placement.kind_ = Placement::Kind::kPartial;
  placement.reduce_op_ = "norm";
  placement.norm_order_ = order;
  return placement;
}

std::string Placement::to_string() const {
  std::ostringstream out;
  if (is_shard()) {
    out << "Shard(dim=" << dim_ << ')';
  } else if (!is_partial()) {
    out << "Replicate()";
  } else if (reduce_op_ == "norm") {
    out << "Partial(norm of order " << norm_order_ << ')';
  } else {
    out << "Partial(" << reduce_op_ << ')';
  }
  return out.str();
}

Chunk chunk_of(int64_t size, int64_t ranks, int64_t rank) {
  const int64_t length = (size + ranks - 1) / ranks;
  const int64_t offset = std::min(length * rank, size);
  return {offset, std::min(length, size - offset)};
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << placement.to_string();
}

std::string to_string(const Placements& placements) {
  std::string text = "[";
  for (const Placement& placement : placements) {
    if (text.size() > 1) text += ", ";
    text += placement.to_string();
  }
  return text + "]";
}

}  // namespace fsdp2
