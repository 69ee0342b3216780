#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fsdp2::files {

/// XXH3-64 of bytes that come in pieces: finds damage, not malice.
class Digest {
 public:
  Digest();
  ~Digest();
  void add(const void* data, size_t size);
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t digest_of(const void* data, size_t size);

}  // namespace fsdp2::files
