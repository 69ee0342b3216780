// Aliases of a DTensor that keep every element on its rank.

#include "dtensor/rules.h"

#include <ATen/InferSize.h>
#include <ATen/WrapDimUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace fsdp2::dtensor {
namespace {

void same_size(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  call.arg(0) = local_of(self);
  call.run();
  call.stack.back() = wrap_alias(call.stack.back().toTensor(), spec_of(self), self.sizes(), self);
}

/// Runs the view on the local part with `sizes` cut to the layout, where the layout allows it.
void view(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const SpecPtr& spec = spec_of(self);
  const auto wanted = at::infer_size_dv(call.arg(1).toIntVector(), self.numel());
  const auto aligned = [&](int64_t dim) {
    // What precedes a sharded dimension may be laid out anew, and so may what follows; it must
    // itself stay.
    if (dim >= static_cast<int64_t>(wanted.size())) return int64_t{-1};
    int64_t before = 1;
    for (int64_t i = 0; i < dim; ++i) before *= self.size(i);
    int64_t product = 1;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (product == before && wanted[i] == self.size(dim)) return static_cast<int64_t>(i);
      product *= wanted[i];
    }
    return int64_t{-1};
  };
  if (self.sizes() == c10::IntArrayRef(wanted)) {
    return call.finish(wrap_alias(local_of(self).alias(), spec, self.sizes(), self));
  }
  for (const Placement& placement : spec->placements) {
    if (!placement.is_shard() || aligned(placement.dim()) >= 0) continue;
    std::ostringstream why;
    why << "a view of size " << c10::IntArrayRef(wanted) << " would move elements between ranks";
    call.refuse(self, why.str());
  }
  const SpecPtr out = map_shards(spec, aligned);
  call.finish(wrap_alias(local_of(self).view(local_sizes(*out, wanted)), out, wanted, self));
}

void expand(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  std::vector<int64_t> wanted = call.arg(1).toIntVector();
  const int64_t added = static_cast<int64_t>(wanted.size()) - self.dim();
  for (int64_t i = 0; i < self.dim(); ++i) {
    int64_t& extent = wanted[i + added];
    if (extent == -1) extent = self.size(i);
    if (extent != self.size(i) && shards(*spec_of(self), i)) {
      call.refuse(self, "the sharded dimension would be expanded");
    }
  }
  const SpecPtr out = map_shards(spec_of(self), [&](int64_t dim) { return dim + added; });
  call.arg(0) = local_of(self);
  call.arg(1) = c10::IntArrayRef(local_sizes(*out, wanted)).vec();
  call.run();
  call.stack.back() = wrap_alias(call.stack.back().toTensor(), out, wanted, self);
}

/// Ops that reorder dimensions: `order[i]` is the old place of new dimension i.
void reorder(Call& call, const std::vector<int64_t>& order) {
  const at::Tensor self = call.arg(0).toTensor();
  std::vector<int64_t> sizes(order.size());
  for (size_t i = 0; i < order.size(); ++i) sizes[i] = self.size(order[i]);
  const SpecPtr out = map_shards(spec_of(self), [&](int64_t dim) {
    return std::find(order.begin(), order.end(), dim) - order.begin();
  });
  call.arg(0) = local_of(self);
  call.run();
  call.stack.back() = wrap_alias(call.stack.back().toTensor(), out, sizes, self);
}

std::vector<int64_t> identity(int64_t ndim) {
  std::vector<int64_t> order(ndim);
  for (int64_t i = 0; i < ndim; ++i) order[i] = i;
  return order;
}

void t(Call& call) {
  auto order = identity(call.arg(0).toTensor().dim());
  TORCH_CHECK(order.size() <= 2, "t() expects a tensor with <= 2 dimensions");
  std::reverse(order.begin(), order.end());
  reorder(call, order);
}

void transpose(Call& call) {
  const int64_t ndim = call.arg(0).toTensor().dim();
  auto order = identity(ndim);
  if (ndim > 0) {
    std::swap(order[at::maybe_wrap_dim(call.arg(1).toInt(), ndim)],
              order[at::maybe_wrap_dim(call.arg(2).toInt(), ndim)]);
  }
  reorder(call, order);
}

void permute(Call& call) {
  const int64_t ndim = call.arg(0).toTensor().dim();
  auto order = call.arg(1).toIntVector();
  TORCH_CHECK(static_cast<int64_t>(order.size()) == ndim, "permute: give every dimension once");
  for (int64_t& dim : order) dim = at::maybe_wrap_dim(dim, ndim);
  reorder(call, order);
}

void unsqueeze(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const int64_t at = at::maybe_wrap_dim(call.arg(1).toInt(), self.dim() + 1);
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes.insert(sizes.begin() + at, 1);
  const SpecPtr out = map_shards(spec_of(self), [&](int64_t dim) { return dim + (dim >= at); });
  call.arg(0) = local_of(self);
  call.run();
  call.stack.back() = wrap_alias(call.stack.back().toTensor(), out, sizes, self);
}

/// Cuts along one dimension: only where every rank has the whole of it.
void cut(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const int64_t dim = at::maybe_wrap_dim(call.arg(*call.find("dim")).toInt(), self.dim());
  if (shards(*spec_of(self), dim)) {
    call.refuse(self, "it would cut along dimension " + std::to_string(dim) + ", which is sharded");
  }
  const bool drops =
      call.op.schema().name() == "aten::select" || call.op.schema().name() == "aten::unbind";
  const SpecPtr out =
      drops ? map_shards(spec_of(self), [&](int64_t d) { return d - (d > dim); }) : spec_of(self);
  const auto wrapped = [&](const at::Tensor& local) {
    std::vector<int64_t> sizes = self.sizes().vec();
    if (drops) {
      sizes.erase(sizes.begin() + dim);
    } else {
      sizes[dim] = local.size(dim);
    }
    return wrap_alias(local, out, sizes, self);
  };
  call.arg(0) = local_of(self);
  call.run();
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& local) {
    return std::optional<at::Tensor>(wrapped(local));
  });
}

}  // namespace

RuleTable view_rules() {
  return {{"detach", same_size},        {"alias", same_size},
          {"lift_fresh", same_size},    {"view", view},
          {"_unsafe_view", view},       {"_reshape_alias", view},
          {"expand", expand},           {"t", t},
          {"transpose.int", transpose}, {"permute", permute},
          {"unsqueeze", unsqueeze},     {"slice.Tensor", cut},
          {"select.int", cut},          {"split.Tensor", cut},
          {"split_with_sizes", cut},    {"unbind.int", cut}};
}

}  // namespace fsdp2::dtensor
