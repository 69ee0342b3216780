#pragma once

// Reductions of ranks on one host: every rank leaves its gradients in memory that all see, and adds
// up its own part, or all of them, from there. One pool of such memory serves all reductions in a
// process group, two of them at a time.

#include "comm/shared_memory.h"

#include <fsdp2/process_group.h>

#include <torch/types.h>

#include <functional>
#include <memory>

namespace fsdp2::comm {

/// Not thread-safe by itself.
class SharedReductions {
 public:
  explicit SharedReductions(std::shared_ptr<Presence> presence);

  /// There will be inputs of that size.
  void want(size_t bytes);
  /// Makes what memory is wanted and not there. Collective over `group`, the same ranks in the same
  /// order; not while a reduction is on its way.
  void prepare(const ProcessGroup& group);
  bool fits(size_t bytes) const;
  /// This rank's memory for the input of the next reduction, uninitialised; it must fit. Ends the
  /// reduction before, so that all ranks have ended the one whose memory this was.
  torch::Tensor next_input(int64_t numel, const at::TensorOptions& options);
  /// The same before it is certain that this is going to be the next; undefined where others would
  /// have to be waited for. Should another reduction come first, `taken` is called and the memory
  /// goes to that one.
  torch::Tensor early_input(int64_t numel, const at::TensorOptions& options,
                            std::function<void()> taken);
  /// It will not be started, or not without next_input().
  void give_back_early_input() { taken_ = nullptr; }
  /// Starts output [n] = this rank's part of the sum of all ranks' inputs [ranks * n], or the sum
  /// of all ranks' inputs [n], which is made in wait(): in rank order, of 16-bit floats in float32,
  /// so the same however ranks are timed; what comes after the first `words` numbers divided by
  /// `divisor`. Not a number if others reduce something of another size.
  Work start(const torch::Tensor& output, const torch::Tensor& input, int64_t words,
             double divisor);

 private:
  class Slots;
  class SumWork;

  const std::shared_ptr<Presence> presence_;
  torch::Tensor input_at(std::byte* data, int64_t numel, const at::TensorOptions& options) const;

  std::shared_ptr<Slots> slots_;
  std::function<void()> taken_;  // of who has an early input
  size_t wanted_ = 0;
};

}  // namespace fsdp2::comm
