// Functions that run again in backward: the values of the plain run, and less memory.

#include "support/counting_allocator.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <ATen/autocast_mode.h>

namespace fsdp2::testing::activation_checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

/// checkpoint(fn, args...) or fn(args...).
struct Runner {
  bool checkpointed = false;
  CheckpointOptions options{};

  template <class Fn, class... Args>
  auto operator()(Fn&& fn, Args&&... args) const {
    return checkpointed
               ? checkpoint(options, std::forward<Fn>(fn), std::forward<Args>(args)...)
               : detail::call_checkpointed(std::forward<Fn>(fn), std::forward<Args>(args)...);
  }
};

using Program = std::function<void(TwoLinear& module, Tensor& x, const Runner& run)>;

/// A program with checkpoints leaves the gradients and random numbers of the one without.
void expect_same_bits(const Program& program) {
  on_ranks(1, [&](int) {
    for (bool early_stop : {true, false}) {
      std::array<Tensor, 2> gradients, random;
      Twins<TwoLinear> twins;
      for (bool checkpointed : {false, true}) {
        Tensor x = input(0).requires_grad_();
        torch::manual_seed(7);
        program(checkpointed ? twins.sharded : twins.plain, x,
                Runner{checkpointed, CheckpointOptions{.early_stop = early_stop}});
        gradients[checkpointed] = x.grad();
        random[checkpointed] = torch::rand({4});
      }
      EXPECT_EQ(difference(gradients[0], gradients[1]), 0);
      EXPECT_EQ(difference(random[0], random[1]), 0);
      twins.expect_same(0);
    }
  });
}

TEST(ActivationCheckpoint, RandomNumbersAreThoseOfTheFirstRun) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    Tensor h = run([&](const Tensor& t) { return torch::dropout(m->forward(t), 0.5, true); }, x);
    h = run([&](const Tensor& t) { return torch::dropout(m->a(t), 0.5, true) * t; }, h);
    (h * torch::rand({5})).sum().backward();
  });
}

TEST(ActivationCheckpoint, ArgumentsAndResultsOfAnyKind) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    const auto both = [&](const Tensor& t, double factor, std::vector<Tensor> more,
                          std::map<std::string, std::optional<Tensor>> by_name) {
      Tensor y = m->forward(t) * factor + more.at(1).sin() * *by_name.at("y");
      return std::tuple(y, y.exp(), std::string("unused"), m->a(t).tanh(), Tensor());
    };
    const Tensor scale = torch::ones({5});
    auto [y, z, text, unused, undefined] =
        run(both, x, 0.5, std::vector<Tensor>{Tensor(), x * 2},
            std::map<std::string, std::optional<Tensor>>{{"y", scale * 3}, {"z", std::nullopt}});
    EXPECT_EQ(text, "unused");
    EXPECT_FALSE(undefined.defined());
    (y.sum() + z.pow(2).sum()).backward();
    std::vector<Tensor> results;
    run([&](Tensor t) { results.push_back(m->b(t).tanh()); }, x);
    results.front().sum().backward();
  });
}

TEST(ActivationCheckpoint, NestedAndUsedTwice) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    const auto first = [&](const Tensor& t) { return torch::tanh(m->a(t)); };
    const auto second = [&](const Tensor& t) {
      return torch::dropout(torch::gelu(m->b(t)), 0.3, true) + run(first, t * 2).exp();
    };
    const auto outer = [&](const Tensor& t) { return run(second, run(first, t)) * t; };
    run([&](const Tensor& t) { return run(outer, run(outer, t)) + run(first, t); }, x)
        .pow(2)
        .sum()
        .backward();
  });
}

TEST(ActivationCheckpoint, FrozenParametersAndInputsWithoutGradients) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    m->a->weight.requires_grad_(false);
    run(m, x.detach()).pow(2).sum().backward();
    m->b->bias.requires_grad_(false);
    run(m, x).pow(2).sum().backward();
  });
}

TEST(ActivationCheckpoint, SeveralBackwards) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    Tensor y = run(m, x);
    Tensor loss = y.pow(2).sum();
    loss.backward({}, /*keep_graph=*/true);
    auto part = torch::autograd::grad({loss}, {m->b->weight}, {}, /*retain_graph=*/true);
    EXPECT_TRUE(part[0].defined());
    y.sum().backward({}, /*keep_graph=*/true);
    loss.backward();
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("second time"));
  });
}

TEST(ActivationCheckpoint, DoubleBackward) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    Tensor y = run([&](const Tensor& t) { return torch::tanh(m->forward(t)).pow(3); }, x);
    auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                          /*create_graph=*/true);
    (gradient[0].pow(2).sum() + y.sum()).backward();
  });
}

TEST(ActivationCheckpoint, BackwardInsideTheFunction) {
  for (bool keep : {false, true}) {
    expect_same_bits([keep](TwoLinear& m, Tensor& x, const Runner& run) {
      run(
          [&](const Tensor& t) {
            Tensor h = torch::tanh(m->a(t));
            Tensor z = h.cos() * h;
            auto gradient = torch::autograd::grad({z.sum()}, {h}, {}, keep);
            return m->b(t) * gradient[0].detach() + (keep ? z : t);
          },
          x)
          .pow(2)
          .sum()
          .backward();
    });
  }
}

TEST(ActivationCheckpoint, CustomFunctionsThatReadWhatTheySavedTwice) {
  struct Twice : torch::autograd::Function<Twice> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
      context->save_for_backward({x});
      return x * x;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0] *
              (context->get_saved_variables()[0] + context->get_saved_variables()[0])};
    }
  };
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    run([&](const Tensor& t) { return Twice::apply(m->a(t)).tanh(); }, x).sum().backward();
  });
}

TEST(ActivationCheckpoint, AutocastIsThatOfTheFirstRun) {
  expect_same_bits([](TwoLinear& m, Tensor& x, const Runner& run) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    Tensor y = run(m, x);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  });
}

TEST(ActivationCheckpoint, WithoutGradModeNothingIsKept) {
  on_ranks(1, [](int) {
    TwoLinear module;
    int runs = 0;
    torch::NoGradGuard no_grad;
    Tensor y = checkpoint([&](const Tensor& t) { return ++runs, module->forward(t); }, input(0));
    EXPECT_FALSE(y.requires_grad());
    EXPECT_EQ(runs, 1);
  });
}

TEST(ActivationCheckpoint, StopsEarlyUnlessToldNotTo) {
  on_ranks(1, [](int) {
    TwoLinear module;
    for (bool early_stop : {true, false}) {
      int begun = 0, ended = 0;
      std::vector<Tensor> drawn;
      Tensor y = checkpoint(
          CheckpointOptions{.preserve_rng_state = early_stop, .early_stop = early_stop},
          [&](const Tensor& t) {
            ++begun;
            drawn.push_back(torch::rand({4}));
            Tensor result = torch::tanh(module->forward(t)) + 1;
            ++ended;
            return result;
          },
          input(0));
      y.sum().backward();
      EXPECT_EQ(begun, 2);
      EXPECT_EQ(ended, early_stop ? 1 : 2);
      EXPECT_EQ(difference(drawn[0], drawn[1]) == 0, early_stop);
    }
  });
}

TEST(ActivationCheckpoint, ASecondRunThatDiffersIsAnError) {
  on_ranks(1, [](int) {
    TwoLinear module;
    int runs = 0;
    const auto error_when_second_is = [&](const std::function<Tensor(Tensor)>& second,
                                          bool early_stop) {
      runs = 0;
      Tensor y = checkpoint(
          CheckpointOptions{.early_stop = early_stop},
          [&](const Tensor& t) {
            return runs++ == 0 ? torch::tanh(module->a(t)).exp() : second(t);
          },
          input(0));
      return error_of([&] { y.sum().backward(); });
    };
    const auto same = [&](const Tensor& t) { return torch::tanh(module->a(t)).exp(); };
    for (bool early_stop : {true, false}) {
      EXPECT_EQ(error_when_second_is(same, early_stop), "");
      EXPECT_THAT(
          error_when_second_is([&](const Tensor& t) { return same(torch::cat({t, t})); },
                               early_stop),
          AllOf(HasSubstr("Float[3, 5]"), HasSubstr("Float[6, 5]"), HasSubstr("run again")));
      EXPECT_THAT(
          error_when_second_is([&](const Tensor& t) { return same(t).to(torch::kDouble).exp(); },
                               /*early_stop=*/false),
          AllOf(HasSubstr("saved 3 tensors"), HasSubstr("and more")));
      EXPECT_THAT(error_when_second_is([&](const Tensor& t) { return module->a(t); }, early_stop),
                  AllOf(HasSubstr("saved 3 tensors"), HasSubstr("but 1")));
      EXPECT_THAT(error_when_second_is(
                      [&](const Tensor& t) { return torch::tanh(module->a(t).to(torch::kDouble)); },
                      early_stop),
                  AllOf(HasSubstr("Float[3, 5]"), HasSubstr("Double[3, 5]")));
    }
    module->zero_grad();
    Twins<TwoLinear> twins;
    twins.plain->forward(input(0)).sum().backward();
    checkpoint(twins.sharded, input(0)).sum().backward();
    twins.expect_same(0);
  });
}

TEST(ActivationCheckpoint, WhatChangedBeforeBackwardIsAnError) {
  on_ranks(1, [](int) {
    Tensor x = input(0);
    Tensor y = checkpoint(TwoLinear(), x);
    x.add_(1);
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("inplace"));
    for (bool sharded : {false, true}) {
      TwoLinear module;
      if (sharded) fully_shard(module);
      torch::optim::SGD optimizer(module->parameters(), 1.0);
      checkpoint(module, x).sum().backward();
      y = checkpoint(module, input(0).requires_grad_());
      optimizer.step();
      if (!sharded) {  // plain, the frontend's optimizers write around the version counter
        torch::NoGradGuard no_grad;
        module->b->weight.mul_(0.5);
      }
      EXPECT_THAT(error_of([&] { y.sum().backward(); }),
                  AllOf(HasSubstr("changed in place"), HasSubstr("backward first")));
    }
  });
}

TEST(ActivationCheckpoint, WrapperKeepsNamesAndIsTheModule) {
  on_ranks(1, [](int) {
    Twins<TwoLinear> twins;
    auto wrapped = checkpoint_wrapper(twins.sharded);
    EXPECT_EQ(wrapped->named_parameters().keys(), twins.plain->named_parameters().keys());
    EXPECT_TRUE(wrapped->a->weight.is_same(twins.sharded->a->weight));
    torch::nn::Sequential sequence(wrapped, CheckpointedHolder<torch::nn::LinearImpl>(5, 2));
    EXPECT_EQ(sequence->named_parameters().keys().front(), "0.a.weight");
    sequence->forward(input(0)).sum().backward();
    EXPECT_TRUE(wrapped->a->weight.grad().defined());
    twins.zero_grad();
    twins.plain->forward(input(0)).sum().backward();
    wrapped(input(0)).sum().backward();
    twins.expect_same(0);

    CheckpointedHolder<torch::nn::LinearImpl> linear(5, 2);
    auto copy = linear->clone();
    EXPECT_TRUE(std::dynamic_pointer_cast<Checkpointed<torch::nn::LinearImpl>>(copy));
    TwoLinear sharded;
    fully_shard(sharded);
    EXPECT_THAT(error_of([&] { checkpoint_wrapper(sharded); }),
                HasSubstr("call checkpoint_wrapper first"));
  });
}

TEST(ActivationCheckpoint, KeepsTheInputsAlone) {
  on_ranks(1, [](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    torch::nn::Sequential layers;
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Tanh());
    auto segment = [layers](const Tensor& t) mutable { return layers->forward(t); };
    const size_t activation = 64 * 64 * sizeof(float);
    for (bool checkpointed : {false, true}) {
      const size_t before = allocator.live_bytes();
      size_t peak = 0;
      allocator.on_allocate = [&] { peak = std::max(peak, allocator.alive(activation)); };
      {
        Tensor x = torch::ones({64, 64}).requires_grad_();
        Tensor h = x;
        for (int i = 0; i < 4; ++i) h = Runner{checkpointed}(segment, h);
        EXPECT_EQ(allocator.alive(activation), checkpointed ? 5U : 25U);
        h.sum().backward();
        EXPECT_EQ(allocator.alive(activation), 3U) << "input, output and gradient";
      }
      EXPECT_EQ(allocator.live_bytes(), before);
      if (checkpointed) {
        EXPECT_LE(peak, 5U + 6U + 3U);
      }
      allocator.on_allocate = nullptr;
    }
  });
}

/// Three residual blocks, the last one tied to the first; how they are checkpointed is up to the
/// test.
struct StackImpl : torch::nn::Module {
  std::vector<TwoLinear> blocks;
  Runner inside, outside;
  StackImpl() {
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), TwoLinear()));
    }
    blocks.push_back(blocks[0]);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (TwoLinear& block : blocks) {
      h = inside(
          [&block](const Tensor& t) { return torch::dropout(block->forward(t), 0.2, true) + t; },
          h);
    }
    return h;
  }
};
TORCH_MODULE(Stack);

class CheckpointOfShards : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CheckpointOfShards, ::testing::Values(1, 2, 3, 4));

struct Wrapping {
  bool each_layer, each_block, inside, outside;
};

void wrap(Stack& stack, const Wrapping& how, const FullyShardOptions& options) {
  for (TwoLinear& block : stack->blocks) {
    if (is_fsdp(*block)) continue;
    if (how.each_layer) wrap_layers(block, options);
    if (how.each_block && !how.each_layer) fully_shard(block, options);
  }
  fully_shard(stack, options);
  stack->inside.checkpointed = how.inside;
  stack->outside.checkpointed = how.outside;
}

const std::vector<Wrapping> kWrappings = {{false, true, true, false},
                                          {true, true, true, false},
                                          {false, true, false, true},
                                          {true, true, true, true},
                                          {false, false, true, false}};

TEST_P(CheckpointOfShards, TrainsAsThePlainModule) {
  on_ranks(GetParam(), [](int) {
    for (const Wrapping& how : kWrappings) {
      Twins<Stack> twins;
      FullyShardOptions options;
      options.reshard_after_forward = true;
      wrap(twins.sharded, how, options);
      torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
          ours(twins.sharded->parameters(), 0.01);
      for (int step = 0; step < 3; ++step) {
        twins.zero_grad();
        reset_collective_counts();
        twins.backward([&](Stack& stack, int rank) {
          const Tensor x = input(rank);
          torch::manual_seed(50 * step + rank);
          return stack->outside([&stack](const Tensor& t) { return stack->forward(t); }, x)
              .pow(2)
              .sum();
        });
        const int groups = how.each_layer ? 4 : how.each_block ? 2 : 1;
        EXPECT_EQ(collective_counts().reduce_scatters, get_world_size() == 1 ? 0 : groups);
        twins.expect_same(get_world_size() == 1 ? 0 : 1e-5);
        plain.step();
        ours.step();
      }
      EXPECT_FALSE(as_fsdp(*twins.sharded).is_unsharded() && !how.each_block);
    }
  });
}

TEST_P(CheckpointOfShards, MixedPrecisionEqualsTheRunWithoutCheckpoints) {
  on_ranks(GetParam(), [](int rank) {
    for (const Wrapping& how : kWrappings) {
      Twins<Stack> twins;
      FullyShardOptions options;
      options.mp_policy.param_dtype = torch::kBFloat16;
      options.mp_policy.reduce_dtype = torch::kFloat;
      options.reshard_after_forward = true;
      Wrapping without = how;
      without.inside = without.outside = false;
      wrap(twins.plain, without, options);
      wrap(twins.sharded, how, options);
      for (Stack* stack : twins.both()) {
        const Tensor x = input(rank);
        torch::manual_seed(rank);
        (*stack)
            ->outside([stack](const Tensor& t) { return (*stack)->forward(t); }, x)
            .pow(2)
            .sum()
            .backward();
      }
      const auto ours = twins.sharded->named_parameters();
      for (const auto& item : twins.plain->named_parameters()) {
        EXPECT_EQ(difference(full(ours[item.key()].grad()), full(item.value().grad())), 0)
            << item.key();
      }
    }
  });
}

TEST_P(CheckpointOfShards, ModulesThatAreHookedAndCheckpointed) {
  on_ranks(GetParam(), [](int rank) {
    using Inside = detail::ShadowHolder<Checkpointed<Hooked<TwoLinearImpl>>>;
    using Outside = HookedHolder<Checkpointed<TwoLinearImpl>>;
    FullyShardOptions options;
    options.mp_policy.param_dtype = torch::kBFloat16;
    options.mp_policy.reduce_dtype = torch::kFloat;
    options.mp_policy.output_dtype = torch::kFloat;
    options.reshard_after_forward = true;
    const auto gradients = [&](auto module, int calls) {
      fully_shard(module, options);
      int hooked = 0;
      module->register_forward_pre_hook([&](torch::nn::Module&, Values& inputs) {
        EXPECT_EQ(inputs.get<Tensor>().scalar_type(), torch::kBFloat16);
        ++hooked;
      });
      module(input(rank)).pow(2).sum().backward();
      EXPECT_EQ(hooked, calls);
      std::vector<Tensor> found;
      for (const Tensor& parameter : module->parameters()) found.push_back(full(parameter.grad()));
      return found;
    };
    torch::manual_seed(1);
    const auto plain = gradients(HookedHolder<TwoLinearImpl>(), 1);
    torch::manual_seed(1);
    const auto inside = gradients(Inside(), 2);
    torch::manual_seed(1);
    const auto outside = gradients(Outside(), 1);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(difference(plain[i], inside[i]), 0);
      EXPECT_EQ(difference(plain[i], outside[i]), 0);
    }
  });
}

/// Its result has another dtype where the weight is cast to than where dtypes promote.
struct ScaleImpl : torch::nn::Module {
  Tensor weight;
  ScaleImpl() { weight = register_parameter("weight", torch::full({5}, 1.1)); }
  Tensor forward(const Tensor& x) { return (x.to(torch::kFloat) * weight).exp(); }
};

TEST_P(CheckpointOfShards, TheSecondRunIsInsideTheBoundariesOfTheFirst) {
  on_ranks(GetParam(), [](int rank) {
    FullyShardOptions options;
    options.mp_policy.param_dtype = torch::kBFloat16;
    options.mp_policy.reduce_dtype = torch::kFloat;
    const auto gradient = [&](auto module) {
      const auto call = fully_shard(module, options);
      Tensor y = call(input(rank));
      EXPECT_EQ(y.scalar_type(), torch::kFloat);
      y.sum().backward();
      return full(module->parameters()[0].grad());
    };
    const Tensor plain = gradient(std::make_shared<ScaleImpl>());
    EXPECT_EQ(difference(gradient(std::make_shared<Checkpointed<ScaleImpl>>()), plain), 0);
    EXPECT_EQ(difference(gradient(std::make_shared<Hooked<Checkpointed<ScaleImpl>>>()), plain), 0);
    EXPECT_EQ(difference(gradient(std::make_shared<Checkpointed<Hooked<ScaleImpl>>>()), plain), 0);
  });
}

}  // namespace
}  // namespace fsdp2::testing::activation_checkpoint
