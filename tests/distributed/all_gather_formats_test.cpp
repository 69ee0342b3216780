// Parameters that travel in a smaller form.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::all_gather_formats {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class Formats : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Formats, ::testing::Values(1, 2, 3, 4));

using Make = std::shared_ptr<AllGatherExtension> (*)();

struct WideImpl : torch::nn::Module {
  Tensor weight;
  WideImpl() {
    torch::manual_seed(1);
    weight = register_parameter("weight", torch::randn({37, 19}) * torch::rand({37, 1}));
  }
};
TORCH_MODULE(Wide);

FullyShardOptions with(Make make) {
  FullyShardOptions options;
  options.all_gather_extension_fn = [make](const Tensor&) { return make(); };
  return options;
}

/// |error| of the gathered weight and the largest magnitude in the same rank's shard.
void each_error(Make make,
                const std::function<void(Tensor error, Tensor value, Tensor largest)>& check) {
  Wide module;
  const Tensor value = module->weight.detach().clone();
  fully_shard(module, with(make));
  torch::NoGradGuard no_grad;
  const Tensor error = (module->weight.clone() - value).abs();
  Tensor largest = torch::empty_like(value);
  for (int rank = 0; rank < get_world_size(); ++rank) {
    const Chunk chunk = chunk_of(37, get_world_size(), rank);
    const Tensor part = value.narrow(0, chunk.offset, chunk.length);
    largest.narrow(0, chunk.offset, chunk.length).copy_(part.abs().max());
  }
  check(error, value, largest);
  EXPECT_GT(error.max().item<double>(), 0);  // it was sent in fewer bits
}

TEST_P(Formats, Float8KeepsToItsBound) {
  on_ranks(GetParam(), [](int) {
    each_error([] { return float8_all_gather(); },
               [](const Tensor& error, const Tensor& value, const Tensor& largest) {
                 const Tensor bound = torch::maximum(value.abs() / 16, largest / 448 / 1024);
                 EXPECT_TRUE((error <= bound * 1.0001).all().item<bool>());
               });
  });
}

TEST_P(Formats, Int8KeepsToItsBound) {
  on_ranks(GetParam(), [](int) {
    each_error([] { return int8_all_gather(32); },
               [](const Tensor& error, const Tensor&, const Tensor& largest) {
                 EXPECT_TRUE((error <= largest / 254 * 1.0001).all().item<bool>());
               });
  });
}

TEST_P(Formats, NormalFloat4KeepsToItsBoundAndItsLevels) {
  on_ranks(GetParam(), [](int) {
    each_error([] { return nf4_all_gather(); },
               [](const Tensor& error, const Tensor&, const Tensor& largest) {
                 EXPECT_TRUE((error <= largest * 0.152).all().item<bool>());
               });
    // A block that holds levels only comes through unchanged.
    struct LevelsImpl : torch::nn::Module {
      Tensor weight;
      LevelsImpl() {
        weight = register_parameter("weight", torch::tensor({-2.F, 0.F, 2.F, 2.F * 0.44070983F}));
      }
    };
    auto module = std::make_shared<LevelsImpl>();
    const Tensor value = module->weight.detach().clone();
    module->weight.set_requires_grad(false);
    fully_shard(module, with([] { return nf4_all_gather(); }));
    torch::NoGradGuard no_grad;
    const double bound = get_world_size() == 1 ? 1e-6 : INFINITY;  // one block, or several
    EXPECT_LE(difference(module->weight.clone(), value), bound);
  });
}

TEST(FormatBytes, HalfAndAQuarterOfBfloat16) {
  on_ranks(2, [](int) {
    const auto bytes = [](const FullyShardOptions& options) {
      torch::nn::Linear linear(torch::nn::LinearOptions(512, 512).bias(false));
      fully_shard(linear, options);
      reset_collective_counts();
      torch::NoGradGuard no_grad;
      linear(torch::ones({1, 512}));
      return static_cast<double>(collective_counts().bytes);
    };
    FullyShardOptions bfloat16;
    bfloat16.mp_policy.param_dtype = torch::kBFloat16;
    const double full = bytes(bfloat16);
    EXPECT_NEAR(bytes(with([] { return float8_all_gather(); })) / full, 0.5, 0.01);
    EXPECT_NEAR(bytes(with([] { return int8_all_gather(); })) / full, 0.5, 0.02);
    EXPECT_NEAR(bytes(with([] { return nf4_all_gather(); })) / full, 0.25, 0.04);
  });
}

TEST_P(Formats, GradientsAreThoseOfTheRebuiltWeightAndShardsKeepTheirPrecision) {
  on_ranks(GetParam(), [](int rank) {
    Wide plain, sharded;
    fully_shard(sharded, with([] { return float8_all_gather(); }));
    torch::manual_seed(5 + rank);
    const Tensor x = torch::randn({3, 37});
    Tensor rebuilt;
    {
      torch::NoGradGuard no_grad;
      rebuilt = sharded->weight.clone();
      EXPECT_LE(difference(full(sharded->parameters()[0]), plain->weight), 0);
    }
    x.mm(sharded->weight).pow(2).sum().backward();
    rebuilt.set_requires_grad(true);
    x.mm(rebuilt).pow(2).sum().backward();
    Tensor expected = rebuilt.grad().clone();
    if (get_world_size() > 1) wait(all_reduce(expected, ReduceOp::kAvg, world_group()));
    const Tensor gradient = full(sharded->parameters()[0].grad());
    EXPECT_LE(difference(gradient, expected), get_world_size() == 1 ? 0 : 1e-3);
  });
}

TEST(FormatErrors, BlocksThatCannotBe) {
  EXPECT_THAT(error_of([] { int8_all_gather(0); }), HasSubstr("at least one"));
  EXPECT_THAT(error_of([] { nf4_all_gather(7); }), HasSubstr("even number"));
}

}  // namespace
}  // namespace fsdp2::testing::all_gather_formats
