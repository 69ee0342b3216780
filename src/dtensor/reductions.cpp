// Reductions: each rank reduces its part, and what spans ranks is left as a Partial.

#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <ATen/WrapDimUtils.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace fsdp2::dtensor {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Which dimensions go, and whether they stay as ones.
struct Reduced {
  std::vector<int64_t> dims;
  bool keepdim = false;
  bool drops(int64_t dim) const { return std::find(dims.begin(), dims.end(), dim) != dims.end(); }
};

Reduced reduced_dims(Call& call, int64_t ndim) {
  Reduced reduced;
  if (const auto index = call.find("dim")) {
    const c10::IValue& value = call.arg(*index);
    if (value.isInt()) {
      reduced.dims = {value.toInt()};
    } else if (value.isIntList()) {
      reduced.dims = value.toIntVector();
    }
  }
  if (reduced.dims.empty()) {
    for (int64_t dim = 0; dim < ndim; ++dim) reduced.dims.push_back(dim);
  }
  for (int64_t& dim : reduced.dims) dim = at::maybe_wrap_dim(dim, ndim);
  if (const auto index = call.find("keepdim")) reduced.keepdim = call.arg(*index).toBool();
  return reduced;
}

Sizes without(c10::IntArrayRef sizes, const Reduced& reduced) {
  Sizes out;
  for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
    if (!reduced.drops(dim)) {
      out.push_back(sizes[dim]);
    } else if (reduced.keepdim) {
      out.push_back(1);
    }
  }
  return out;
}

SpecPtr reduced_spec(const SpecPtr& spec, const Reduced& reduced, const Placement& partial) {
  Placements placements = spec->placements;
  for (Placement& placement : placements) {
    if (!placement.is_shard()) continue;
    const int64_t dim = placement.dim();
    if (reduced.drops(dim)) {
      placement = partial;
    } else if (!reduced.keepdim) {
      int64_t before = 0;
      for (int64_t other : reduced.dims) before += other < dim;
      placement = Shard(dim - before);
    }
  }
  return with_placements(*spec, std::move(placements));
}

std::optional<at::ScalarType> dtype_argument(Call& call) {
  const auto index = call.find("dtype");
  if (!index || call.arg(*index).isNone()) return std::nullopt;
  return call.arg(*index).toScalarType();
}

bool all_linear(const Spec& spec) {
  return std::all_of(spec.placements.begin(), spec.placements.end(),
                     [](const Placement& placement) {
                       return !placement.is_partial() || placement.reduce_op() == "sum" ||
                              placement.reduce_op() == "avg";
                     });
}

/// The tensor to reduce: Partials first become whole, unless the op is linear and they are. When
/// that leaves nothing sharded, the op itself is right.
bool begin(Call& call, at::Tensor& self, bool linear = false) {
  self = call.arg(0).toTensor();
  if (call.info.mutates) {  // out=
    run_on_whole(call);
    return true;
  }
  if (!linear || !all_linear(*spec_of(self))) self = finished(self);
  if (!spec_of(self)->replicated) return false;
  call.arg(0) = self;
  TORCH_INTERNAL_ASSERT(run_replicated(call));
  return true;
}

void end(Call& call, const at::Tensor& self, const Reduced& reduced, at::Tensor local,
         const Placement& partial) {
  call.finish(wrap(std::move(local), reduced_spec(spec_of(self), reduced, partial),
                   without(self.sizes(), reduced)));
}

at::Tensor run_on(Call& call, const at::Tensor& local) {
  torch::jit::Stack copy(call.stack.end() - static_cast<int64_t>(call.info.arguments),
                         call.stack.end());
  copy[0] = local;
  call.op.callBoxed(copy);
  return copy.back().toTensor();
}

template <bool linear>
void sum(Call& call) {
  at::Tensor self;
  if (begin(call, self, linear)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  end(call, self, reduced, run_on(call, local_of(self)), Partial("sum"));
}

void mean(Call& call) {
  at::Tensor self;
  if (begin(call, self, true)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  const auto dtype = dtype_argument(call).value_or(self.scalar_type());
  TORCH_CHECK(at::isFloatingType(dtype) || at::isComplexType(dtype),
              "mean(): the dtype must be floating point or complex, but is ", dtype);
  double count = 1;  // over all ranks: a mean of means would weigh uneven parts alike
  for (int64_t dim : reduced.dims) count *= static_cast<double>(self.size(dim));
  end(call, self, reduced,
      at::sum(local_of(self), reduced.dims, reduced.keepdim, dtype).div_(count), Partial("sum"));
}

/// Distance: the norm of the difference.
void distance(Call& call) {
  call.finish(at::norm(call.arg(0).toTensor() - call.arg(1).toTensor(), call.arg(2).toScalar()));
}

/// What a rank without elements says in a maximum (sign +1) or minimum (-1).
at::Scalar neutral(at::ScalarType dtype, int sign) {
  if (at::isFloatingType(dtype)) return -sign * kInfinity;
  if (dtype == at::kBool) return sign < 0;
  return AT_DISPATCH_INTEGRAL_TYPES(dtype, "neutral", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    return at::Scalar(static_cast<int64_t>(sign > 0 ? Limits::lowest() : Limits::max()));
  });
}

template <int sign>
void extremum(Call& call) {
  at::Tensor self;
  if (begin(call, self)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  const at::Tensor& local = local_of(self);
  TORCH_CHECK_INDEX(self.numel() > 0, call.name(), " of a tensor without elements");
  const at::Tensor value = local.numel() > 0
                               ? run_on(call, local)
                               : at::full(without(local.sizes(), reduced),
                                          neutral(local.scalar_type(), sign), local.options());
  end(call, self, reduced, value, Partial(sign > 0 ? "max" : "min"));
}

template <int sign>  // any: true wins; all: false wins. Defined for no elements.
void logical(Call& call) {
  at::Tensor self;
  if (begin(call, self)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  end(call, self, reduced, run_on(call, local_of(self)), Partial(sign > 0 ? "max" : "min"));
}

void product(Call& call) {
  at::Tensor self;
  if (begin(call, self)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  end(call, self, reduced, run_on(call, local_of(self)), Partial("product"));
}

/// Ops along one dimension: on parts where every rank has the whole of it, else on whole values.
void along_dim(Call& call) {
  const at::Tensor given = call.arg(0).toTensor();
  const auto index = call.find("dim");
  const bool cut =
      !index || !call.arg(*index).isInt() || given.dim() == 0 || call.info.mutates ||
      shards(*spec_of(given), at::maybe_wrap_dim(call.arg(*index).toInt(), given.dim()));
  if (cut) return run_on_whole(call);
  at::Tensor self;
  if (begin(call, self)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  const SpecPtr spec = reduced_spec(spec_of(self), reduced, Replicate());
  const Sizes sizes = without(self.sizes(), reduced);
  call.arg(0) = local_of(self);
  call.run();
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& local) {
    return std::optional<at::Tensor>(wrap(local, spec, sizes));
  });
}

void norm(Call& call) {
  at::Tensor self;
  if (begin(call, self)) return;
  const Reduced reduced = reduced_dims(call, self.dim());
  double order = 2;
  for (const char* name : {"p", "ord"}) {
    const auto index = call.find(name);
    if (index && !call.arg(*index).isNone()) order = call.arg(*index).toScalar().toDouble();
  }
  const at::Tensor& local = local_of(self);
  at::Tensor value;
  if (local.numel() == 0 && (std::isinf(order) || order < 0)) {
    const auto dtype = dtype_argument(call).value_or(local.scalar_type());
    value = at::full(without(local.sizes(), reduced), order > 0 ? 0.0 : kInfinity,
                     local.options().dtype(at::toRealValueType(dtype)));
  } else {
    value = run_on(call, local);
  }
  end(call, self, reduced, value,
      order == 0          ? Partial("sum")
      : std::isinf(order) ? Partial(order > 0 ? "max" : "min")
                          : PartialNorm(order));
}

}  // namespace

RuleTable reduction_rules() {
  return {{"sum", sum<true>},
          {"nansum", sum<false>},
          {"count_nonzero", sum<false>},
          {"mean", mean},
          {"max", extremum<1>},
          {"amax", extremum<1>},
          {"min", extremum<-1>},
          {"amin", extremum<-1>},
          {"max.dim", along_dim},
          {"min.dim", along_dim},
          {"argmax", along_dim},
          {"argmin", along_dim},
          {"kthvalue", along_dim},
          {"median.dim", along_dim},
          {"mode", along_dim},
          {"dist", distance},
          {"any", logical<1>},
          {"all", logical<-1>},
          {"prod", product},
          {"norm", norm},
          {"linalg_vector_norm", norm}};
}

}  // namespace fsdp2::dtensor
