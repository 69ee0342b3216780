// Activation checkpointing as people write it in C++: a custom Function whose backward runs a
// forward and a backward.

#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::nested_backward {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Segment = std::function<Tensor(const Tensor&)>;

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor&,
                        const Segment* run) {
    context->save_for_backward({x});
    context->saved_data["run"] = reinterpret_cast<int64_t>(run);
    torch::NoGradGuard no_grad;
    return (*run)(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto* run = reinterpret_cast<const Segment*>(context->saved_data["run"].toInt());
    Tensor y;
    {
      torch::AutoGradMode enabled(true);
      y = (*run)(x);
    }
    y.backward(gradients[0]);
    return {x.grad(), Tensor(), Tensor()};
  }
};

Tensor checkpoint(const Segment& run, const Tensor& x) {
  static const Tensor anchor = torch::zeros({1}).requires_grad_();
  return Checkpoint::apply(x, anchor, &run);
}

class NestedBackward : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, NestedBackward, ::testing::Values(1, 2, 3));

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

struct Segments {
  explicit Segments(TwoLinear& module)
      : first([&](const Tensor& t) { return torch::tanh(module->a(t)); }),
        both([&](const Tensor& t) { return torch::tanh(module->b(module->a(t))); }),
        outer([&](const Tensor& t) { return checkpoint(both, checkpoint(first, t)) + t; }) {}
  Segment first, both, outer;
};

void expect_right(const std::function<Tensor(Segments&, const Tensor&)>& run,
                  int64_t most_reductions) {
  for (bool apart : {false, true}) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, apart);
    Segments plain(twins.plain), ours(twins.sharded);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      reset_collective_counts();
      twins.backward([&](TwoLinear& module, int rank) {
        return run(&module == &twins.plain ? plain : ours, input(rank)).pow(2).sum();
      });
      EXPECT_LE(collective_counts().reduce_scatters, (apart ? 2 : 1) * most_reductions);
      twins.expect_same(2e-6);  // the sums associate differently
      EXPECT_FALSE(as_fsdp(*twins.sharded).is_unsharded() && !apart) << "left gathered";
    }
  }
}

TEST_P(NestedBackward, LayerTiedOverThreeCheckpoints) {
  on_ranks(GetParam(), [](int) {
    expect_right(
        [](Segments& s, const Tensor& x) {
          return checkpoint(s.first, checkpoint(s.both, checkpoint(s.first, x)));
        },
        2);
  });
}

TEST_P(NestedBackward, CheckpointInsideACheckpoint) {
  on_ranks(GetParam(), [](int) {
    expect_right([](Segments& s, const Tensor& x) { return checkpoint(s.outer, x); }, 2);
  });
}

TEST_P(NestedBackward, CheckpointBetweenPlainLayers) {
  on_ranks(GetParam(), [](int) {
    expect_right(
        [](Segments& s, const Tensor& x) { return s.first(checkpoint(s.both, s.first(x))); }, 2);
  });
}

}  // namespace
}  // namespace fsdp2::testing::nested_backward
