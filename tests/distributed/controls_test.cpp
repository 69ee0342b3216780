// The controls of a wrapped module.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::controls {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class Controls : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Controls, ::testing::Values(1, 2, 3, 4));

struct ChainImpl : torch::nn::Module {
  std::vector<torch::nn::Linear> layers;
  ChainImpl() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(5, 5)));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
};
TORCH_MODULE(Chain);

Tensor chain_loss(Chain& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

std::vector<FSDPModule> wrap_chain(Chain& chain) {
  std::vector<FSDPModule> wrapped;
  for (auto& layer : chain->layers) wrapped.push_back(fully_shard(layer));
  wrapped.push_back(fully_shard(chain));
  return wrapped;
}

TEST_P(Controls, RequestedPrefetchesAreThereAheadAndValuesAreTheSame) {
  on_ranks(GetParam(), [](int) {
    Twins<Chain> twins;
    auto wrapped = wrap_chain(twins.sharded);
    wrapped[0].set_modules_to_forward_prefetch({wrapped[1], wrapped[2]});
    wrapped[1].set_modules_to_forward_prefetch({wrapped[2], wrapped[3]});
    wrapped[2].set_modules_to_forward_prefetch({});
    wrapped[3].set_modules_to_backward_prefetch({wrapped[2], wrapped[1]});
    wrapped[2].set_modules_to_backward_prefetch({wrapped[1], wrapped[0]});
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward(chain_loss);
      twins.expect_same(rounding_bound());
    }
    // The first layer's gather brings two more with it, each once.
    reset_collective_counts();
    twins.sharded->layers[0](torch::ones({2, 5}));
    EXPECT_EQ(collective_counts().all_gathers, get_world_size() == 1 ? 0 : 3);
    twins.sharded->layers[1](torch::ones({2, 5}));
    twins.sharded->layers[2](torch::ones({2, 5}));
    EXPECT_EQ(collective_counts().all_gathers, get_world_size() == 1 ? 0 : 4);
  });
}

TEST_P(Controls, PrefetchOfAnotherRootIsRefused) {
  on_ranks(GetParam(), [](int) {
    TwoLinear one, other;
    FSDPModule first = fully_shard(one), second = fully_shard(other);
    first.set_modules_to_forward_prefetch({second});
    EXPECT_THAT(error_of([&] { one->forward(torch::ones({2, 5})); }),
                HasSubstr("belongs to another root"));
  });
}

TEST_P(Controls, WithoutUnshardInBackwardNothingIsGatheredAhead) {
  on_ranks(GetParam(), [](int) {
    Twins<Chain> twins;
    auto wrapped = wrap_chain(twins.sharded);
    wrapped[0].set_unshard_in_backward(false);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward(chain_loss);
      twins.expect_same(rounding_bound());
    }
  });
}

Tensor two_loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

TEST_P(Controls, GradientsAreDividedByTheFactorGiven) {
  for (auto reduce : {torch::kFloat, torch::kHalf}) {
    on_ranks(GetParam(), [&](int rank) {
      TwoLinear module;
      FullyShardOptions options;
      options.mp_policy.reduce_dtype = reduce;
      FSDPModule controls = fully_shard(module, options);
      controls.set_gradient_divide_factor(4);
      (module->a->weight.sum() * (rank + 1.0) * 4).backward();
      const int world = get_world_size();
      EXPECT_LE(difference(full(module->named_parameters()["a.weight"].grad()),
                           torch::full({5, 5}, world * (world + 1) / 2.0)),
                0);
      EXPECT_THAT(error_of([&] { controls.set_gradient_divide_factor(0); }),
                  HasSubstr("cannot be divided by 0"));
    });
  }
}

TEST_P(Controls, TheAllReduceHookSeesTheMeanAndMayChangeIt) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    FSDPModule controls = fully_shard(module);
    int calls = 0;
    controls.set_all_reduce_hook([&](const Tensor& gradients) {
      ++calls;
      EXPECT_EQ(gradients.dim(), 1);
      gradients.mul_(10);
    });
    (module->a->weight.sum() * (rank + 1.0)).backward();
    EXPECT_EQ(calls, 1);
    EXPECT_LE(difference(full(module->named_parameters()["a.weight"].grad()),
                         torch::full({5, 5}, 5.0 * (get_world_size() + 1))),
              1e-6);
    controls.set_all_reduce_hook({});
    module->zero_grad();
    (module->a->weight.sum() * (rank + 1.0)).backward();
    EXPECT_EQ(calls, 1);
  });
}

struct CountingGather : AllGather {
  int calls = 0, allocations = 0;
  Tensor allocate(c10::IntArrayRef sizes, const torch::TensorOptions& options) override {
    ++allocations;
    return AllGather::allocate(sizes, options);
  }
  Work operator()(const Tensor& output, const Tensor& input, const ProcessGroup& group) override {
    ++calls;
    return all_gather_single(output, input, group);
  }
};
struct CountingScatter : ReduceScatter {
  int calls = 0;
  Work operator()(const Tensor& output, const Tensor& input, const ProcessGroup& group) override {
    ++calls;
    return reduce_scatter_single(output, input, ReduceOp::kSum, group);
  }
};

TEST_P(Controls, CustomCommunicationCarriesTheBytes) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    FSDPModule controls = fully_shard(twins.sharded);
    auto gather = std::make_shared<CountingGather>();
    auto scatter = std::make_shared<CountingScatter>();
    controls.set_custom_all_gather(gather);
    controls.set_custom_reduce_scatter(scatter);
    twins.backward(two_loss);
    twins.expect_same(rounding_bound());
    EXPECT_EQ(gather->calls, 1);
    EXPECT_EQ(gather->allocations, 2);
    EXPECT_EQ(scatter->calls, 1);
    EXPECT_THAT(error_of([&] { controls.set_allocate_memory_from_process_group_for_comm(true); }),
                HasSubstr("custom communication"));
    controls.set_custom_all_gather(nullptr);
    controls.set_custom_reduce_scatter(nullptr);
    EXPECT_THAT(error_of([&] { controls.set_allocate_memory_from_process_group_for_comm(true); }),
                HasSubstr("no allocator of its own"));
    twins.backward(two_loss);
    twins.expect_same(rounding_bound());
    EXPECT_EQ(gather->calls, 1);
  });
}

TEST_P(Controls, MoreReductionsInFlightGiveTheSame) {
  on_ranks(GetParam(), [](int) {
    Twins<Chain> twins;
    auto wrapped = wrap_chain(twins.sharded);
    wrapped.back().set_reduce_scatter_max_input_buffers(3);
    for (int step = 0; step < 2; ++step) {
      twins.backward(chain_loss);
      twins.expect_same(rounding_bound());
    }
    EXPECT_THAT(error_of([&] { wrapped[0].set_reduce_scatter_max_input_buffers(0); }),
                HasSubstr("at least 1"));
  });
}

TEST_P(Controls, ResettingTheIterationDropsWhatWasAddedUp) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    FSDPModule controls = as_fsdp(*twins.sharded);
    controls.set_requires_gradient_sync(false);
    two_loss(twins.sharded, get_rank()).backward();
    controls.reset_iter_state();
    controls.set_requires_gradient_sync(true);
    twins.backward(two_loss);
    twins.expect_same(rounding_bound());
    EXPECT_THAT(error_of([&] { as_fsdp(*twins.sharded->a).reset_iter_state(); }),
                HasSubstr("is not a root"));
  });
}

// Partial sums within a copy, added up before the sum over copies: 2 x 2 ranks, three passes with
// gradients (rank + 1) * 10^pass. The mean over ranks of the sum is 2.5 * 111.
struct OneImpl : torch::nn::Module {
  Tensor w;
  OneImpl() { w = register_parameter("w", torch::zeros({4, 2})); }
};
TORCH_MODULE(One);

enum class Accumulate { kEveryPass, kWithoutSync, kWithoutAllReduce };
class DelayedAllReduce : public ::testing::TestWithParam<Accumulate> {};
std::string way_name(const ::testing::TestParamInfo<Accumulate>& way) {
  const std::vector<std::string> names = {"EveryPass", "WithoutSync", "WithoutAllReduce"};
  return names[static_cast<size_t>(way.param)];
}
INSTANTIATE_TEST_SUITE_P(Ways, DelayedAllReduce,
                         ::testing::Values(Accumulate::kEveryPass, Accumulate::kWithoutSync,
                                           Accumulate::kWithoutAllReduce),
                         &way_name);

TEST_P(DelayedAllReduce, NoPassIsLostAndReplicasAgree) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 2}, {4, 1}, {1, 4}}) {
    on_ranks(4, [&](int rank) {
      One module;
      FullyShardOptions options;
      options.mesh = init_device_mesh("cpu", shape, {"replicate", "shard"});
      FSDPModule controls = fully_shard(module, options);
      for (int round = 0; round < 2; ++round) {
        module->zero_grad();
        for (int pass = 0; pass < 3; ++pass) {
          const bool last = pass == 2;
          if (GetParam() == Accumulate::kWithoutSync) controls.set_requires_gradient_sync(last);
          if (GetParam() == Accumulate::kWithoutAllReduce) controls.set_requires_all_reduce(last);
          reset_collective_counts();
          (module->w * ((rank + 1) * std::pow(10.0, pass))).sum().backward();
          const bool sums = GetParam() == Accumulate::kEveryPass || last;
          EXPECT_EQ(collective_counts().all_reduces, sums && shape[0] > 1 ? 1 : 0);
          EXPECT_EQ(module->parameters()[0].grad().defined(), sums);
        }
        EXPECT_LE(difference(full(module->parameters()[0].grad()), torch::full({4, 2}, 277.5)),
                  1e-4);
      }
    });
  }
}

TEST(DelayedAllReduceGroups, AGroupThatTheLastPassDoesNotUseIsReducedToo) {
  on_ranks(4, [](int rank) {
    TwoLinear module;
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    wrap_layers(module, options);
    FSDPModule controls = as_fsdp(*module);
    controls.set_requires_all_reduce(false);
    (module->a->weight.sum() * (rank + 1.0)).backward();
    controls.set_requires_all_reduce(true);
    (module->b->weight.sum() * (rank + 1.0)).backward();
    const auto parameters = module->named_parameters();
    for (const char* name : {"a.weight", "b.weight"})
      EXPECT_LE(difference(full(parameters[name].grad()), torch::full({5, 5}, 2.5)), 1e-6);
  });
}

}  // namespace
}  // namespace fsdp2::testing::controls
