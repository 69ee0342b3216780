#include "fsdp/wrap_options.h"

namespace fsdp2::fsdp {
namespace {

void place_on(const ShardPlacement& wanted, const DeviceMesh& mesh, PlannedParam& planned) {
  const torch::Tensor& parameter = planned.spec.tensor;
  const auto what = [&] {
    return c10::str("fully_shard: shard_placement_fn gives ", wanted.placement.to_string(),
                    " for parameter '", planned.spec.name, "' of size ", parameter.sizes());
  };
  TORCH_CHECK(!wanted.placement.is_partial(), what(), "; it must be a Shard or Replicate()");
  if (wanted.mesh.defined()) {
    check_mesh(wanted.mesh);
    TORCH_CHECK(wanted.mesh.device_type() == mesh.device_type(), what(), " on the mesh ",
                wanted.mesh.to_string(), ", whose device type is not that of ", mesh.to_string());
    TORCH_CHECK(wanted.mesh.get_coordinate(), what(), " on the mesh ", wanted.mesh.to_string(),
                ", which this rank is not in");
    planned.mesh = wanted.mesh;
  }
  planned.spec.shard_dim.reset();
  if (wanted.placement.is_replicate()) return;
  const int64_t dim = wanted.placement.dim();
  TORCH_CHECK(dim >= -parameter.dim() && dim < parameter.dim(), what(), ", which has ",
              parameter.dim(), " dimensions");
  const int64_t shard_dim = dim < 0 ? dim + parameter.dim() : dim;
  const int64_t ranks = planned.mesh.size(planned.mesh.ndim() - 1);
  TORCH_CHECK(shard_dim == 0 || parameter.size(shard_dim) % ranks == 0, what(),
              ": only dimension 0 may be split unevenly, and ", parameter.size(shard_dim),
              " does not divide by the ", ranks, " ranks of ", planned.mesh.to_string());
  planned.spec.shard_dim = shard_dim;
}

}  // namespace

void check_mesh(const DeviceMesh& mesh) {
  TORCH_CHECK(mesh.ndim() == 1 || mesh.ndim() == 2,
              "fully_shard: the mesh must be 1-D, or 2-D to replicate over its first dimension and "
              "shard over its second, but it is ",
              mesh.to_string(), "; pass one or two of its dimensions, mesh[{\"a\", \"b\"}]");
  TORCH_CHECK(mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
              "fully_shard: a 2-D mesh must name its dimensions, so that it is plain which one "
              "replicates and which one shards: init_device_mesh(device, shape, {\"replicate\", "
              "\"shard\"})");
}

GroupPolicy group_policy(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const MixedPrecisionPolicy& mp = options.mp_policy;
  for (const auto& dtype : {mp.param_dtype, mp.reduce_dtype, mp.output_dtype}) {
    TORCH_CHECK(!dtype || c10::isFloatingType(*dtype), "fully_shard: mp_policy has ",
                c10::toString(dtype.value_or(torch::kFloat)), "; its dtypes must be floating");
  }
  GroupPolicy policy{.mp = mp, .shard_device = mesh.device()};
  const auto* offload = std::get_if<CPUOffloadPolicy>(&options.offload_policy);
  if (offload && !mesh.device().is_cpu()) {
    policy.shard_device = c10::kCPU;
    policy.pin_memory = offload->pin_memory;
  }
  return policy;
}

void plan_reshard_after_forward(const FullyShardOptions& options, Plan& plan) {
  if (!options.reshard_after_forward) return;
  if (const bool* flag = std::get_if<bool>(&*options.reshard_after_forward)) {
    plan.reshard_after_forward = *flag;
    return;
  }
  const int64_t ranks = std::get<int64_t>(*options.reshard_after_forward);
  const int64_t all = plan.mesh.size(plan.mesh.ndim() - 1);
  TORCH_CHECK(ranks >= 1 && ranks <= all && all % ranks == 0,
              "fully_shard: reshard_after_forward as a number must be a factor of ", all,
              ", the ranks that parameters are sharded over, but it is ", ranks);
  if (ranks == 1 && all > 1) {
    TORCH_WARN_ONCE(
        "fully_shard: reshard_after_forward = 1 (a number) keeps parameters whole after forward, "
        "as "
        "false does. To free them, say true.");
  }
  plan.reshard_after_forward = ranks > 1 || all == 1;
  if (ranks > 1 && ranks < all) plan.reshard_to = ranks;
}

void place(const FullyShardOptions& options, const DeviceMesh& mesh, PlannedParam& planned) {
  const torch::Tensor& parameter = planned.spec.tensor;
  if (options.mp_policy.param_dtype == parameter.scalar_type() && parameter.element_size() == 2) {
    TORCH_WARN_ONCE("fully_shard: parameter '", planned.spec.name, "' is ", parameter.scalar_type(),
                    " already, and so stay its shard and the optimizer's updates: small ones are "
                    "lost to rounding. Build the model in float32 to train it in that.");
  }
  planned.mesh = mesh;
  const bool small = parameter.dim() == 0 || parameter.numel() < options.replicate_below;
  if (!small) planned.spec.shard_dim = 0;
  if (options.shard_placement_fn) {
    if (const auto wanted = options.shard_placement_fn(parameter)) place_on(*wanted, mesh, planned);
  }
  if (options.all_gather_extension_fn && planned.spec.shard_dim)
    planned.spec.extension = options.all_gather_extension_fn(parameter);
}

}  // namespace fsdp2::fsdp
