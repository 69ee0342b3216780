#pragma once

// Do all ranks start from the same model? FSDP2 does not ask: each rank shards the weights it has,
// so a rank that drew others contributes other rows, and replicas drift apart. What
// DistributedDataParallel and FSDP1 (sync_module_states) do for that.

#include <fsdp2/device_mesh.h>

#include <torch/nn/module.h>

namespace fsdp2 {

/// Makes parameters and buffers those of the mesh's first rank. Collective over `mesh`. Before
/// fully_shard every plain tensor is sent whole. Of sharded parameters only what the mesh
/// replicates is sent (shards differ by nature): call it before wrapping, or initialise with
/// init_weights. Error on all ranks, before anything changes, if names, sizes or dtypes differ.
void sync_module_states(torch::nn::Module& module, const DeviceMesh& mesh);

/// Error on all ranks if parameters or buffers that should be equal differ, bit for bit; it names
/// each and the mesh dimension along which it differs. Collective over `mesh`. The same tensors as
/// above. fully_shard does it by itself when FSDP2_DEBUG=1 is in the environment.
void check_module_states(const torch::nn::Module& module, const DeviceMesh& mesh);

}  // namespace fsdp2
