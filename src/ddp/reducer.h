#pragma once

// libtorch's bucketed all-reduce, driven step by step instead of by its own hooks.

#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <vector>

namespace fsdp2::ddp {

struct ReducerOptions {
  double bucket_cap_mb = 25;
  bool gradient_as_bucket_view = false;
};

class Reducer : private c10d::Reducer {
 public:
  /// Buckets hold parameters in the reverse of their order.
  Reducer(const std::vector<torch::Tensor>& parameters, const ProcessGroup& group,
          const ReducerOptions& options);

  /// Before the first gradient of a backward. Waits for what an abandoned one has left behind.
  void begin();
  /// This rank's gradient of a parameter is there, or will not come. Once for each.
  void mark(size_t index) { autograd_hook(index); }
  /// All are marked, inside of backward: blocks until the means have arrived. They are in the
  /// gradients when the callbacks that are queued with the engine so far have run.
  void wait();
  /// On how many ranks each parameter had a gradient; negative if a rank abandoned its backward.
  torch::Tensor counts() const { return get_local_used_map_on_device(); }
  /// This rank's backward has failed: what the others still wait for is sent, marked as void.
  void abandon();

 private:
  class Means;

  void send(torch::Tensor tensor);

  Means* means_ = nullptr;  // null where ranks do not share memory
  std::vector<Work> left_behind_;
};

std::unique_ptr<Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                      const ProcessGroup& group, const ReducerOptions& options);

}  // namespace fsdp2::ddp
