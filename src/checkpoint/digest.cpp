#include "checkpoint/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp2::files {

struct Digest::State {
  XXH3_state_t state;
};

Digest::Digest() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->state); }
Digest::~Digest() = default;
void Digest::add(const void* data, size_t size) { XXH3_64bits_update(&state_->state, data, size); }
uint64_t Digest::value() const { return XXH3_64bits_digest(&state_->state); }

uint64_t digest_of(const void* data, size_t size) { return XXH3_64bits(data, size); }

}  // namespace fsdp2::files
