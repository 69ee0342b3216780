#pragma once

namespace fsdp2::fsdp {

/// Makes torch's dispatcher know gathered parameters. Called at every fully_shard: ops that were
/// registered since the last call are covered then.
void register_gathered();

}  // namespace fsdp2::fsdp
