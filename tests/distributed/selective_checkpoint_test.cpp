// Checkpoints that keep what some ops returned: those do not run again, and nothing else differs.

#include "support/counting_allocator.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <torch/library.h>

#include <map>

namespace fsdp2::testing::selective_checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local int costly_runs = 0;

Tensor costly(const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("fsdp2_selective_test::costly", "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

struct Costly : torch::autograd::Function<Costly> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x});
    return costly(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0].exp()};
  }
};

TORCH_LIBRARY(fsdp2_selective_test, m) { m.def("costly(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(fsdp2_selective_test, CPU, m) {
  m.impl("costly", [](const Tensor& x) { return ++costly_runs, x.exp(); });
}
TORCH_LIBRARY_IMPL(fsdp2_selective_test, AutogradCPU, m) {
  m.impl("costly", [](const Tensor& x) { return Costly::apply(x); });
}

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

CheckpointOptions keeping(std::vector<std::string> ops) {
  CheckpointOptions options;
  options.op_list = std::move(ops);
  return options;
}

using RunFn = std::function<Tensor(const std::function<Tensor(const Tensor&)>&, const Tensor&)>;

/// A program whose checkpoints keep results leaves the gradients and random numbers of one without
/// checkpoints. Returns how often the costly op ran in it.
int expect_same_bits(const CheckpointOptions& options,
                     const std::function<void(TwoLinear&, Tensor&, const RunFn&)>& program) {
  const RunFn runs[] = {
      [](const auto& fn, const Tensor& x) { return fn(x); },
      [&](const auto& fn, const Tensor& x) { return checkpoint(options, fn, x); }};
  std::array<Tensor, 2> gradients, random;
  Twins<TwoLinear> twins;
  for (size_t i = 0; i < 2; ++i) {
    costly_runs = 0;
    Tensor x = input(0).requires_grad_();
    torch::manual_seed(7);
    program(*twins.both()[i], x, runs[i]);
    gradients[i] = x.grad();
    random[i] = torch::rand({4});
  }
  EXPECT_EQ(difference(gradients[0], gradients[1]), 0);
  EXPECT_EQ(difference(random[0], random[1]), 0);
  twins.expect_same(0);
  return costly_runs;
}

TEST(SelectiveCheckpoint, OpsOfTheListRunOnce) {
  on_ranks(1, [](int) {
    const auto program = [](TwoLinear& m, Tensor& x, const RunFn& run) {
      run([&](const Tensor& t) { return costly(torch::tanh(m->a(costly(t)))).sin(); }, x)
          .sum()
          .backward();
    };
    EXPECT_EQ(expect_same_bits(keeping({"aten::addmm"}), program), 4);
    EXPECT_EQ(expect_same_bits(keeping({"fsdp2_selective_test::costly"}), program), 2);
    EXPECT_EQ(expect_same_bits({}, program), 4);
  });
}

TEST(SelectiveCheckpoint, PolicyDecidesForEachCall) {
  on_ranks(1, [](int) {
    CheckpointOptions options;
    int asked = 0;
    options.policy_fn = [&](const SelectiveCheckpointContext& context) {
      if (context.op.name() != "fsdp2_selective_test::costly") {
        EXPECT_FALSE(context.op.name() == "aten::t" || context.op.name() == "aten::relu_");
        return CheckpointPolicy::kPreferRecompute;
      }
      EXPECT_EQ(context.arguments.at(0).toTensor().sizes(), (std::vector<int64_t>{3, 5}));
      return ++asked == 2 ? CheckpointPolicy::kMustSave : CheckpointPolicy::kMustRecompute;
    };
    const int runs = expect_same_bits(options, [](TwoLinear& m, Tensor& x, const RunFn& run) {
      run([&](const Tensor& t) { return costly(costly(m->a(costly(t)).relu_()).tanh()).sin(); }, x)
          .sum()
          .backward();
    });
    EXPECT_EQ(runs, 5) << "three in the first run, two in the second";
    EXPECT_EQ(asked, 3) << "in the first run only";
  });
}

TEST(SelectiveCheckpoint, RandomNumbersBehindAKeptOpAreThoseOfTheFirstRun) {
  on_ranks(1, [](int) {
    const auto program = [](TwoLinear& m, Tensor& x, const RunFn& run) {
      const auto fn = [&](const Tensor& t) {
        Tensor h = std::get<0>(at::native_dropout(m->a(t), 0.5, true));
        h = torch::dropout(h.exp(), 0.5, true) * torch::rand_like(t);
        return std::get<0>(at::native_dropout(h.sin(), 0.5, true)) * torch::rand({5});
      };
      run(fn, run(fn, x)).sum().backward();
    };
    expect_same_bits(keeping({"aten::native_dropout"}), program);
    expect_same_bits(keeping({"aten::rand_like", "aten::mul"}), program);
    expect_same_bits(keeping({"aten::native_dropout", "aten::rand_like", "aten::rand"}), program);
  });
}

TEST(SelectiveCheckpoint, ResultsThatWereChangedAreComputedAgain) {
  on_ranks(1, [](int) {
    const CheckpointOptions options = keeping({"aten::addmm", "fsdp2_selective_test::costly"});
    const int runs = expect_same_bits(options, [](TwoLinear& m, Tensor& x, const RunFn& run) {
      Tensor y = run(
          [&](const Tensor& t) { return costly(m->a(t).relu_()).mul_(2).sin() + costly(t); }, x);
      y.add_(1);
      y.sum().backward({}, /*keep_graph=*/true);
      y.sum().backward();
    });
    EXPECT_EQ(runs, 4) << "the first one again in each backward";
    Tensor x = input(0).requires_grad_(), output;
    const auto fn = [&](const Tensor& t) {
      output = costly(t);
      return output.sin();
    };
    fn(x).sum().backward();
    const Tensor plain = x.grad();
    x.mutable_grad() = Tensor();
    Tensor y = checkpoint(options, fn, x);
    output.detach().zero_();
    y.sum().backward();
    EXPECT_EQ(difference(x.grad(), plain), 0);
  });
}

TEST(SelectiveCheckpoint, ResultsThatWereChangedThroughAnotherAreComputedAgain) {
  on_ranks(1, [](int) {
    // Neither aten::_unsafe_view, nor aten::linear that calls it, says where its result lies.
    for (const char* op : {"aten::mm", "aten::_unsafe_view"}) {
      expect_same_bits(keeping({op}), [](TwoLinear& m, Tensor& x, const RunFn& run) {
        const auto fn = [&](const Tensor& t) {
          Tensor h = at::_unsafe_view(torch::mm(t, m->b->weight), {5, 3}).add_(1);
          const Tensor wide = torch::stack({t, t}).transpose(0, 1);
          return h.sin().t() + torch::linear(wide, m->a->weight, m->a->bias).sin().sum(1);
        };
        run(fn, x).sum().backward();
        Tensor y = run(
            [&](const Tensor& t) {
              return at::_unsafe_view(torch::mm(t, m->b->weight).exp().mm(m->a->weight), {15});
            },
            x);
        y.add_(1);
        y.pow(2).sum().backward();
      });
    }
  });
}

TEST(SelectiveCheckpoint, NestedUsedTwiceAndSeveralBackwards) {
  on_ranks(1, [](int) {
    const auto options = keeping({"aten::addmm", "fsdp2_selective_test::costly", "aten::tanh"});
    for (const bool early_stop : {true, false}) {
      CheckpointOptions each = options;
      each.early_stop = early_stop;
      expect_same_bits(each, [](TwoLinear& m, Tensor& x, const RunFn& run) {
        const auto first = [&](const Tensor& t) { return torch::tanh(m->a(t)); };
        const auto second = [&](const Tensor& t) {
          return torch::dropout(costly(m->b(t)), 0.3, true) + run(first, t * 2).exp();
        };
        const auto outer = [&](const Tensor& t) { return run(second, run(first, t)) * t; };
        Tensor y =
            run([&](const Tensor& t) { return run(outer, run(outer, t)) + run(first, t); }, x);
        y.sum().backward({}, /*keep_graph=*/true);
        auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                              /*create_graph=*/true);
        (gradient[0].pow(2).sum() + y.pow(2).sum()).backward();
      });
      expect_same_bits(each, [](TwoLinear& m, Tensor& x, const RunFn& run) {
        run(
            [&](const Tensor& t) {
              Tensor h = torch::tanh(costly(m->a(t)));
              auto gradient = torch::autograd::grad({(h.cos() * h).sum()}, {h});
              return m->b(costly(t)) * gradient[0].detach();
            },
            x)
            .pow(2)
            .sum()
            .backward();
      });
    }
  });
}

TEST(SelectiveCheckpoint, KeepsResultsOfTheListAlone) {
  on_ranks(1, [](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    const size_t activation = sizeof(float) * 64 * 64;
    const auto segment = [](const Tensor& t) { return t.sin().tanh().sin().tanh().sin().tanh(); };
    const size_t before = allocator.live_bytes();
    const std::map<std::string, size_t> kept = {
        {"aten::cos", 5}, {"aten::sin", 17}, {"aten::tanh", 13}};
    for (const auto& [op, count] : kept) {
      {
        Tensor h = torch::ones({64, 64}).requires_grad_();
        for (int i = 0; i < 4; ++i) h = checkpoint(keeping({op}), segment, h);
        // Each input, the last output, and three results a segment: of tanh, one is the output.
        EXPECT_EQ(allocator.alive(activation), count) << op;
        h.sum().backward();
        EXPECT_EQ(allocator.alive(activation), 3U) << "input, output and gradient";
      }
      EXPECT_EQ(allocator.live_bytes(), before);
    }
  });
}

TEST(SelectiveCheckpoint, WhatCannotBeKeptIsAnError) {
  on_ranks(1, [](int) {
    TwoLinear module;
    const auto error = [&](CheckpointOptions options) {
      return error_of([&] { checkpoint(options, module, input(0)); });
    };
    EXPECT_THAT(error(keeping({"aten::mn"})), HasSubstr("no op 'aten::mn'"));
    EXPECT_THAT(
        error(keeping({"aten::linear"})),
        AllOf(HasSubstr("'aten::linear', which only calls other ops"), HasSubstr("aten::addmm")));
    for (const char* op : {"aten::relu_", "aten::add.out", "aten::t", "aten::view"}) {
      EXPECT_THAT(error(keeping({op})), HasSubstr("nothing can be kept"));
    }
    CheckpointOptions both = keeping({"aten::addmm"});
    both.policy_fn = [](const auto&) { return CheckpointPolicy::kMustSave; };
    EXPECT_THAT(error(both), HasSubstr("not both"));
    EXPECT_EQ(error(keeping({"aten::sum.dim_IntList", "aten::add"})), "");
  });
}

TEST(SelectiveCheckpoint, ASecondRunWithMoreCallsIsAnError) {
  on_ranks(1, [](int) {
    int runs = 0;
    Tensor y = checkpoint(
        keeping({"aten::tanh"}),
        [&](const Tensor& t) {
          const Tensor h = torch::tanh(runs++ == 0 ? t : torch::tanh(t));
          return h.exp();
        },
        input(0).requires_grad_());
    EXPECT_THAT(error_of([&] { y.sum().backward(); }),
                AllOf(HasSubstr("called aten::tanh 1 times"), HasSubstr("run again")));
    EXPECT_EQ(expect_same_bits(
                  {},
                  [](TwoLinear& m, Tensor& x, const RunFn& run) {
                    run([&](const Tensor& t) { return costly(m->a(t)); }, x).sum().backward();
                  }),
              2);
  });
}

/// Attention and dropout between projections, with a residual stream.
struct LayerImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
  explicit LayerImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    in = register_module("in", torch::nn::Linear(dim, 3 * dim));
    out = register_module("out", torch::nn::Linear(dim, dim));
  }
  Tensor forward(const Tensor& x) {
    const auto parts = in(norm(x)).view({x.size(0), x.size(1), 2, -1}).transpose(1, 2).chunk(3, -1);
    const Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return x + torch::dropout(out(y.transpose(1, 2).flatten(2)), 0.2, is_training());
  }
};
TORCH_MODULE(Layer);

struct StackImpl : torch::nn::Module {
  Layer first{6}, second{6};
  bool checkpointed = false;
  CheckpointOptions options;
  StackImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  Tensor forward(const Tensor& x) {
    if (!checkpointed) return second(first(x));
    return checkpoint(options, second, checkpoint(options, first, x));
  }
};
TORCH_MODULE(Stack);

class SelectiveCheckpointOfShards : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, SelectiveCheckpointOfShards, ::testing::Values(1, 2, 3, 4));

CheckpointOptions keeping_the_costly() {
  return keeping({"aten::addmm", "aten::native_layer_norm",
                  "aten::_scaled_dot_product_flash_attention_for_cpu"});
}

TEST_P(SelectiveCheckpointOfShards, EqualsTheRunWithoutCheckpointsInBothWrapOrders) {
  on_ranks(GetParam(), [](int rank) {
    for (const bool mixed : {false, true}) {
      for (const bool wrapper_outside : {false, true}) {
        FullyShardOptions options;
        options.reshard_after_forward = true;
        if (mixed) {
          options.mp_policy.param_dtype = torch::kBFloat16;
          options.mp_policy.reduce_dtype = torch::kFloat;
        }
        const auto gradients = [&](bool checkpointed) {
          torch::manual_seed(1);
          Stack stack;
          stack->options = keeping_the_costly();
          stack->checkpointed = checkpointed && !wrapper_outside;
          std::function<Tensor(const Tensor&)> call;
          if (checkpointed && wrapper_outside) {
            auto wrapped = checkpoint_wrapper(stack, keeping_the_costly());
            fully_shard(wrapped->first, options);
            fully_shard(wrapped->second, options);
            fully_shard(wrapped, options);
            call = [wrapped](const Tensor& x) mutable { return wrapped->forward(x); };
          } else {
            fully_shard(stack->first, options);
            fully_shard(stack->second, options);
            fully_shard(stack, options);
            call = [stack](const Tensor& x) mutable { return stack->forward(x); };
          }
          std::vector<Tensor> found;
          for (int step = 0; step < 2; ++step) {
            torch::manual_seed(30 + rank);
            call(torch::randn({2, 4, 6})).pow(2).sum().backward();
          }
          for (const Tensor& p : stack->parameters()) found.push_back(full(p.grad()));
          return found;
        };
        const auto plain = gradients(false), ours = gradients(true);
        for (size_t i = 0; i < plain.size(); ++i) {
          EXPECT_EQ(difference(plain[i], ours[i]), 0) << i << (mixed ? " mixed" : "");
        }
      }
    }
  });
}

TEST_P(SelectiveCheckpointOfShards, TrainsAsThePlainModule) {
  on_ranks(GetParam(), [](int) {
    Twins<Stack> twins;
    twins.sharded->checkpointed = true;
    // Whoever asks for everything: gathers and reductions are not asked about.
    twins.sharded->options.policy_fn = [](const SelectiveCheckpointContext& context) {
      EXPECT_FALSE(context.op.name().starts_with("c10d::")) << context.op.name();
      return CheckpointPolicy::kMustSave;
    };
    FullyShardOptions options;
    options.reshard_after_forward = true;
    fully_shard(twins.sharded->first, options);
    fully_shard(twins.sharded->second, options);
    fully_shard(twins.sharded, options);
    torch::optim::SGD plain(twins.plain->parameters(), 0.01),
        ours(twins.sharded->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([&](Stack& stack, int rank) {
        torch::manual_seed(50 * step + rank);
        return stack->forward(torch::randn({2, 4, 6})).pow(2).sum();
      });
      twins.expect_same(get_world_size() == 1 ? 0 : 2e-5);
      plain.step();
      ours.step();
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::selective_checkpoint
