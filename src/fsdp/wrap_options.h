#pragma once

// What the options of one fully_shard call mean, checked before anything changes.

#include "fsdp/wrap_plan.h"

namespace fsdp2::fsdp {

/// Error unless the mesh is 1-D or a named 2-D one.
void check_mesh(const DeviceMesh& mesh);
GroupPolicy group_policy(const FullyShardOptions& options, const DeviceMesh& mesh);
/// Fills in reshard_after_forward and reshard_to.
void plan_reshard_after_forward(const FullyShardOptions& options, Plan& plan);
/// Decides where the parameter goes and what travels.
void place(const FullyShardOptions& options, const DeviceMesh& mesh, PlannedParam& planned);

}  // namespace fsdp2::fsdp
