#pragma once

namespace fsdp2::fsdp {

/// Makes torch's dispatcher know gathered parameters. Called at every fully_shard: ops that were
/// registered since the last call are covered then.
void register_gathered();

/// Meta kernels that decoders need and libtorch has in Python only; for the life of the process.
void register_meta_kernels();

}  // namespace fsdp2::fsdp
