// Aliases of a DTensor. Where elements stay on their ranks, views of local parts; else of the
// whole.

#include "dtensor/mirror.h"
#include "dtensor/rules.h"

#include <ATen/InferSize.h>
#include <ATen/WrapDimUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp2::dtensor {
namespace {

void same_size(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  call.arg(0) = local_of(self);
  call.run();
  const at::Tensor result =
      wrap_alias(call.stack.back().toTensor(), spec_of(self), self.sizes(), self);
  impl_of(result)->set_sizes_and_strides(self.sizes(), self.strides());
  call.stack.back() = result;
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
  const bool moves = std::any_of(spec->placements.begin(), spec->placements.end(),
                                 [&](const Placement& placement) {
                                   return placement.is_shard() && aligned(placement.dim()) < 0;
                                 });
  if (moves) return view_of_whole(call, wanted);
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
    if (extent != self.size(i) && shards(*spec_of(self), i)) return view_of_whole(call);
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
  std::vector<int64_t> sizes, strides;
  for (const int64_t dim : order) {
    sizes.push_back(self.size(dim));
    strides.push_back(self.stride(dim));  // not the local part's: those of one row are ambiguous
  }
  const SpecPtr out = map_shards(spec_of(self), [&](int64_t dim) {
    return std::find(order.begin(), order.end(), dim) - order.begin();
  });
  call.arg(0) = local_of(self);
  call.run();
  const at::Tensor result = wrap_alias(call.stack.back().toTensor(), out, sizes, self);
  impl_of(result)->set_sizes_and_strides(sizes, strides);
  call.stack.back() = result;
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

void squeeze(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  std::vector<int64_t> dropped;
  const auto drop = [&](int64_t dim) {
    if (self.dim() == 0) return;
    dim = at::maybe_wrap_dim(dim, self.dim());
    if (self.size(dim) == 1) dropped.push_back(dim);
  };
  if (call.info.arguments == 1) {
    for (int64_t dim = 0; dim < self.dim(); ++dim) drop(dim);
  } else if (call.arg(1).isInt()) {
    drop(call.arg(1).toInt());
  } else {
    for (const int64_t dim : call.arg(1).toIntVector()) drop(dim);
  }
  std::vector<int64_t> sizes, kept(self.dim(), -1);
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (std::find(dropped.begin(), dropped.end(), dim) == dropped.end()) {
      kept[dim] = static_cast<int64_t>(sizes.size());
      sizes.push_back(self.size(dim));
    } else if (shards(*spec_of(self), dim)) {
      return view_of_whole(call);
    }
  }
  const SpecPtr out = map_shards(spec_of(self), [&](int64_t dim) { return kept[dim]; });
  call.finish(wrap_alias(local_of(self).squeeze(dropped), out, sizes, self));
}

/// Another dtype of the same width.
void view_as_dtype(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const auto dtype = call.arg(1).toScalarType();
  if (static_cast<int64_t>(c10::elementSize(dtype)) != self.element_size()) {
    call.refuse(self, "a view as a dtype of another width would change the size");
  }
  call.finish(wrap_alias(local_of(self).view(dtype), spec_of(self), self.sizes(), self));
}

void as_strided(Call& call) {
  call.refuse(call.arg(0).toTensor(),
              "parts have no common memory to stride over (backward of an in-place op on a view "
              "needs it: write `x = op(x)` instead)");
}

/// Cuts along one dimension.
void cut(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const int64_t dim = at::maybe_wrap_dim(call.arg(*call.find("dim")).toInt(), self.dim());
  if (shards(*spec_of(self), dim)) return view_of_whole(call);
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
          {"split_with_sizes", cut},    {"unbind.int", cut},
          {"squeeze", squeeze},         {"diagonal", view_of_whole},
          {"unfold", view_of_whole},    {"view.dtype", view_as_dtype},
          {"as_strided", as_strided}};
}

}  // namespace fsdp2::dtensor
