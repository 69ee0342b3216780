#pragma once

// The input of one reduction while it fills: for each rank a piece, which is some words and then
// that rank's part of each gradient, padded, all in one dtype.

#include "fsdp/copying_comm.h"

#include <vector>

namespace fsdp2::fsdp {

class ReduceBuffer {
 public:
  /// `params` are indexes into the context's layouts.
  ReduceBuffer(CommContextPtr context, std::vector<size_t> params, torch::ScalarType dtype);

  /// Numbers of real_options() that a rank's piece has, the first words() of them words.
  int64_t piece() const { return piece_; }
  int64_t words() const { return words_; }
  /// Complex gradients travel as pairs of real numbers.
  at::TensorOptions real_options() const;
  size_t nbytes() const;
  const std::vector<size_t>& params() const { return params_; }

  /// [ranks * piece()], uninitialised.
  void set_memory(torch::Tensor input) { input_ = std::move(input); }
  const torch::Tensor& input() const { return input_; }

  // `i` is the position in params().
  bool has(size_t i) const { return filled_[i]; }
  /// A whole gradient; adds it if there is one already.
  void put(size_t i, const torch::Tensor& gradient);
  /// The whole gradient again; undefined if there is none.
  torch::Tensor take(size_t i);
  /// No more comes: absent gradients are zeros, and this rank's words are `words`, float32.
  void close(const torch::Tensor& words, double divisor);

  /// The part of `piece` (one rank's input, or the reduction's output) that is a parameter's.
  torch::Tensor part(const torch::Tensor& piece, size_t i, c10::IntArrayRef sizes) const;

 private:
  void put_rows(const torch::Tensor& pieces, size_t i, const torch::Tensor& flat, int64_t chunk,
                bool again);

  const CommContextPtr context_;
  const std::vector<size_t> params_;
  const torch::ScalarType dtype_;
  struct Slot {
    int64_t offset, length;  // in real numbers
  };
  std::vector<Slot> slots_;
  std::vector<bool> filled_;
  int64_t words_ = 0, piece_ = 0;
  torch::Tensor input_;
};

/// In front of a reduction of so many parameters: bits of a fingerprint, and a flag for each.
constexpr uint32_t kFingerprintBits = 24;
int64_t words_for(size_t params);

}  // namespace fsdp2::fsdp
