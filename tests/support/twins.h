#pragma once

// Two modules with the same values: one stays plain, the other is for the test to wrap.

#include "support/training.h"

#include <array>
#include <utility>

namespace fsdp2::testing {

template <class M>
struct Twins {
  M plain, sharded;

  /// Both made by M(arguments...); the same values on all ranks.
  template <class... Arguments>
  explicit Twins(const Arguments&... arguments)
      : plain(make(arguments...)), sharded(make(arguments...)) {}
  std::array<M*, 2> both() { return {&plain, &sharded}; }

  /// Backward of both: the plain one of the mean over ranks of loss(module, rank), the sharded one
  /// of this rank's.
  template <class Loss>
  void backward(Loss&& loss) {
    torch::Tensor sum;
    for (int rank = 0; rank < get_world_size(); ++rank) {
      torch::Tensor part = loss(plain, rank);
      sum = sum.defined() ? sum + part : part;
    }
    (sum / get_world_size()).backward();
    loss(sharded, get_rank()).backward();
  }
  void expect_same(double bound, bool gradients = true) {
    expect_same_module(*sharded, *plain, bound, gradients);
  }
  void zero_grad() {
    plain->zero_grad();
    sharded->zero_grad();
  }

 private:
  template <class... Arguments>
  static M make(const Arguments&... arguments) {
    torch::manual_seed(1);
    return M(arguments...);
  }
};

/// Two square layers whose size no number of ranks from 2 to 4 divides.
struct TwoLinearImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  TwoLinearImpl() {
    a = register_module("a", torch::nn::Linear(5, 5));
    b = register_module("b", torch::nn::Linear(5, 5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return b(torch::tanh(a(x))); }
};
TORCH_MODULE(TwoLinear);

/// A group for each layer.
inline void wrap_layers(TwoLinear& module, const FullyShardOptions& options) {
  fully_shard(module->a, options);
  fully_shard(module->b, options);
  fully_shard(module, options);
}

/// A group for each layer, or one for both. Freed after forward if asked.
inline void wrap_layers(TwoLinear& module, bool apart, bool reshard_after_forward = true) {
  FullyShardOptions options;
  options.reshard_after_forward = reshard_after_forward;
  if (apart) return wrap_layers(module, options);
  fully_shard(module, options);
}

}  // namespace fsdp2::testing
