#include "dtensor/operands.h"

#include "dispatch/backward.h"
#include "dtensor/redistribute.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace fsdp2::dtensor {
namespace {

struct Operand {
  size_t index;
  at::Tensor tensor;
  bool written;
};
using Operands = c10::SmallVector<Operand, 6>;

Operands operands_of(Call& call) {
  Operands operands;
  for (size_t i = 0; i < call.info.arguments; ++i) {
    if (!call.info.tensors[i]) continue;
    const c10::IValue& value = call.arg(i);
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    operands.push_back({i, value.toTensor(), call.info.written[i]});
  }
  return operands;
}

/// Runs the op on arguments that are local parts now, and puts what it gives back into the layout.
void run_local(Call& call, const Operands& operands, const SpecPtr& spec, c10::IntArrayRef sizes) {
  const Operand* out = nullptr;
  if (call.info.mutates) {
    for (const Operand& operand : operands) {
      if (operand.written) out = &operand;
    }
  }
  if (out) announce_write(out->tensor);
  call.run();
  if (call.info.returns == 0) return;
  c10::IValue& result = call.stack.back();
  if (out) {
    result = out->tensor;
  } else {
    result = wrap(result.toTensor(), spec, sizes);
  }
}

/// All DTensors have one layout and size, and the rest are numbers or 0-dim tensors: nothing has to
/// move.
bool run_alike(Call& call, const Operands& operands, bool partial_stays) {
  const at::Tensor* leader = nullptr;
  for (const Operand& operand : operands) {
    if (is_dtensor(operand.tensor)) {
      if (!leader) {
        leader = &operand.tensor;
        if (spec_of(*leader)->partial && !partial_stays) return false;
      } else if (spec_of(operand.tensor) != spec_of(*leader) ||
                 operand.tensor.sizes() != leader->sizes()) {
        return false;
      }
    } else if (operand.tensor.dim() > 0 || operand.written || operand.tensor.requires_grad()) {
      return false;
    }
  }
  for (const Operand& operand : operands) {
    // A 0-dim DTensor and a plain tensor: what comes out is plain, see run_plain.
    if (leader->dim() == 0 && is_plain_operand(operand.tensor)) return false;
  }
  for (const Operand& operand : operands) {
    if (is_dtensor(operand.tensor)) call.arg(operand.index) = local_of(operand.tensor);
  }
  run_local(call, operands, spec_of(*leader), leader->sizes());
  return true;
}

bool partial_stays(const Call& call, const Operands& operands, Linearity linearity) {
  const auto linear = [](const Spec& spec) {
    return std::all_of(spec.placements.begin(), spec.placements.end(), [](const Placement& p) {
      return !p.is_partial() || p.reduce_op() == "sum" || p.reduce_op() == "avg";
    });
  };
  const auto is_partial = [](const Operand& operand) {
    return is_dtensor(operand.tensor) && spec_of(operand.tensor)->partial;
  };
  switch (linearity) {
    case Linearity::kNone:
      return false;
    case Linearity::kKeeps:
      return std::all_of(operands.begin(), operands.end(), is_partial);
    case Linearity::kUnary:
      return operands.size() == 1 && linear(*spec_of(operands[0].tensor));
    case Linearity::kAdditive:
      return call.info.arguments > 1 && operands.size() > 1 && operands[1].index == 1 &&
             std::all_of(operands.begin(), operands.end(), [&](const Operand& operand) {
               return is_partial(operand) && linear(*spec_of(operand.tensor));
             });
    case Linearity::kScaling:
      return is_partial(operands[0]) && linear(*spec_of(operands[0].tensor)) &&
             operands[0].index == 0 &&
             std::all_of(operands.begin() + 1, operands.end(), [](const Operand& operand) {
               return !is_dtensor(operand.tensor) && !is_plain_operand(operand.tensor);
             });
  }
  return false;
}

/// 0-dim DTensors that meet plain tensors and no larger DTensor: their whole values are what
/// counts, and the result is plain, so that a loss may add plain and sharded terms and hand plain
/// gradients to both.
bool run_plain(Call& call, Operands& operands) {
  std::vector<at::Tensor> scalars;
  bool plain = false;
  for (const Operand& operand : operands) {
    if (!is_dtensor(operand.tensor)) {
      plain = plain || is_plain_operand(operand.tensor);
      continue;
    }
    if (operand.tensor.dim() > 0 || operand.written) return false;
    scalars.push_back(operand.tensor);
  }
  if (!plain) return false;
  scalars = finished(std::move(scalars));
  auto next = scalars.begin();
  for (const Operand& operand : operands) {
    if (is_dtensor(operand.tensor)) call.arg(operand.index) = local_of(*next++);
  }
  call.run();
  return true;
}

Sizes broadcast_size(const Call& call, const Operands& operands) {
  Sizes sizes;
  for (const Operand& operand : operands) {
    if (!is_dtensor(operand.tensor)) continue;  // judged by conform()
    const auto of = operand.tensor.sizes();
    if (of.size() > sizes.size()) sizes.insert(sizes.begin(), of.size() - sizes.size(), 1);
    for (size_t i = 0; i < of.size(); ++i) {
      int64_t& extent = sizes[sizes.size() - of.size() + i];
      if (of[i] == 1 || of[i] == extent) continue;
      if (extent != 1) {
        std::ostringstream why;
        why << "sizes";
        for (const Operand& each : operands) why << ' ' << each.tensor.sizes();
        why << " do not fit together";
        call.refuse(operand.tensor, why.str());
      }
      extent = of[i];
    }
  }
  return sizes;
}

int64_t count_shards(const Spec& spec) {
  return std::count_if(spec.placements.begin(), spec.placements.end(),
                       [](const Placement& placement) { return placement.is_shard(); });
}

/// What the others follow: the tensor that is written, else the most sharded one of the result's
/// size.
const at::Tensor* leader_of(const Operands& operands, c10::IntArrayRef sizes) {
  const at::Tensor* leader = nullptr;
  for (const Operand& operand : operands) {
    if (operand.written) return &operand.tensor;
    if (!is_dtensor(operand.tensor) || operand.tensor.sizes() != sizes) continue;
    if (!leader || count_shards(*spec_of(operand.tensor)) > count_shards(*spec_of(*leader))) {
      leader = &operand.tensor;
    }
  }
  return leader;
}

/// A plain tensor is written from DTensors: only whole values can be.
void run_into_plain(Call& call, const Operands& operands, const at::Tensor& out) {
  for (const Operand& operand : operands) {
    if (!is_dtensor(operand.tensor)) continue;
    const at::Tensor whole = operand.tensor.dim() == 0 ? finished(operand.tensor) : operand.tensor;
    if (!spec_of(whole)->replicated) {
      std::ostringstream why;
      why << "it would write shards into a plain tensor of size " << out.sizes();
      call.refuse(operand.tensor, why.str());
    }
    call.arg(operand.index) = local_of(whole);
  }
  call.run();
}

}  // namespace

at::Tensor conform(const Call& call, const at::Tensor& operand, const Target& target) {
  if (!is_dtensor(operand)) {
    if (operand.unsafeGetTensorImpl()->is_wrapped_number()) return operand;
    if (operand.requires_grad() && c10::GradMode::is_enabled()) {
      call.refuse(
          operand,
          "a plain tensor that requires grad would get this rank's part of its gradient; make it a "
          "DTensor (distribute_tensor, DTensor::from_local) or detach() it");
    }
    if (operand.dim() == 0) return operand;
    if (operand.sizes() != c10::IntArrayRef(target.sizes)) {
      std::ostringstream why;
      why << "a plain tensor of size " << operand.sizes() << " meets a DTensor of size "
          << c10::IntArrayRef(target.sizes)
          << " (this rank's part: " << c10::IntArrayRef(local_sizes(*target.spec, target.sizes))
          << "). A plain operand must be 0-dim or have the global size; wrap a local part with "
             "DTensor::from_local";
      call.refuse(operand, why.str());
    }
    return part_of(operand, *target.spec);
  }
  if (spec_of(operand) == target.spec && operand.sizes() == c10::IntArrayRef(target.sizes)) {
    return local_of(operand);
  }
  if (operand.dim() == 0) return local_of(finished(operand));
  const auto missing = static_cast<int64_t>(target.sizes.size()) - operand.dim();
  Placements wanted = target.spec->placements;
  for (Placement& placement : wanted) {
    if (!placement.is_shard()) continue;
    const int64_t dim = placement.dim() - missing;
    const bool whole = dim < 0 || operand.size(dim) != target.sizes[placement.dim()];
    placement = whole ? Replicate() : Shard(dim);
  }
  if (spec_of(operand)->mesh != target.spec->mesh) {
    call.refuse(operand, "it meets a DTensor on another mesh, " + target.spec->mesh.to_string());
  }
  return local_of(redistributed(operand, with_placements(*target.spec, std::move(wanted))));
}

namespace {

/// A Partial that shares its parts with no other tensor becomes what it reduces to.
bool finish_in_place(const at::Tensor& tensor) {
  DTensorImpl* impl = impl_of(tensor);
  if (impl->local.use_count() > 1 || impl->local.storage().use_count() > 1) return false;
  const at::Tensor value = local_of(finished(tensor)).clone();
  impl->spec = without_partial(impl->spec);
  impl->local = value;
  impl->finished.reset();
  return true;
}

void check_plain_operands(const Call& call, const Operands& operands) {
  if (dispatch::inside_backward()) return;
  const Operand* sharded = nullptr;
  const Operand* plain = nullptr;
  for (const Operand& operand : operands) {
    if (!is_dtensor(operand.tensor)) {
      if (operand.tensor.numel() > 1) plain = &operand;
    } else if (refuses_plain(operand.tensor, operand.written)) {
      sharded = &operand;
    }
  }
  if (sharded && plain) refuse_plain(call, sharded->tensor, plain->tensor);
}

}  // namespace

bool refuses_plain(const at::Tensor& dtensor, bool written) {
  return (c10::GradMode::is_enabled() && dtensor.requires_grad()) ||
         (!written && has_write_observer(dtensor));
}

void refuse_plain(const Call& call, const at::Tensor& dtensor, const at::Tensor& plain) {
  std::ostringstream why;
  why << "a plain tensor of size " << plain.sizes()
      << " meets it, and might differ from rank to rank: if it does not, say so with "
         "distribute_tensor(tensor, mesh, {Replicate()})";
  call.refuse(dtensor, why.str());
}

void run_pointwise(Call& call, Linearity linearity) {
  Operands operands = operands_of(call);
  const bool stays = linearity != Linearity::kNone && partial_stays(call, operands, linearity);
  if (run_alike(call, operands, stays)) return;
  if (run_plain(call, operands)) return;
  check_plain_operands(call, operands);
  const at::Tensor* written = nullptr;
  for (Operand& operand : operands) {
    if (operand.written) {
      written = &operand.tensor;
      continue;
    }
    // Larger ones are reduced straight into the leader's layout.
    if (is_dtensor(operand.tensor) && operand.tensor.dim() == 0) {
      operand.tensor = finished(operand.tensor);
    }
  }
  if (written && !is_dtensor(*written)) return run_into_plain(call, operands, *written);
  if (written && spec_of(*written)->partial && !finish_in_place(*written)) {
    call.refuse(*written, "it would write to a tensor that is not reduced yet, and has aliases");
  }
  Target target;
  target.sizes = broadcast_size(call, operands);
  const at::Tensor* leader = leader_of(operands, target.sizes);
  if (!leader) return run_on_whole(call);  // a row times a column
  if (leader->sizes() != c10::IntArrayRef(target.sizes)) {
    std::ostringstream why;
    why << "a result of size " << c10::IntArrayRef(target.sizes) << " does not fit into it";
    call.refuse(*leader, why.str());
  }
  target.spec = without_partial(spec_of(*leader));
  for (const Operand& operand : operands) {
    call.arg(operand.index) = conform(call, operand.tensor, target);
  }
  run_local(call, operands, target.spec, target.sizes);
}

}  // namespace fsdp2::dtensor
