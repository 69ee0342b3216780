#pragma once

// The two integer hashes that initial weights, data order and the data split are made of.

#include <cstdint>
#include <string_view>

namespace fsdp2::train {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

/// The output function of SplitMix64.
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EB;
  return z ^ (z >> 31U);
}

inline uint64_t fnv1a64(std::string_view bytes) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

}  // namespace fsdp2::train
