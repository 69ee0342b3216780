#pragma once

#include <cstdint>

namespace fsdp2::train {

/// A shuffle of [0, size) that needs no memory: the place of `index` under the order that `key`
/// picks. Error if index is outside.
uint64_t permute(uint64_t index, uint64_t size, uint64_t key);

}  // namespace fsdp2::train
