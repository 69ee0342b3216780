// pytorch#149205: the model runs once before the optimizer is made, or the optimizer is made before
// the wrap.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::model_used_before_optimizer {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

struct ScaleImpl : torch::nn::Module {
  Tensor param;
  ScaleImpl() { param = register_parameter("param", torch::ones({8})); }
  Tensor forward(const Tensor& x) { return param * x; }
};
TORCH_MODULE(Scale);

TEST(ModelUsedBeforeOptimizer, TrainsTheShards) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [](int) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool gradient = variant & 1, backward = variant & 4;
        FullyShardOptions options;
        options.reshard_after_forward = (variant & 2) != 0;
        Scale module;
        fully_shard(module, options);
        const Tensor x = torch::ones({8});
        Tensor first;
        {
          torch::AutoGradMode mode(gradient);
          first = module->forward(x).sum();
          EXPECT_TRUE(is_dtensor(module->parameters()[0]));
        }
        if (backward && gradient) first.backward();
        EXPECT_TRUE(is_dtensor(module->parameters()[0]));
        torch::optim::SGD optimizer(module->parameters(), 0.1);
        optimizer.zero_grad();
        module->forward(x).sum().backward();
        optimizer.step();
        EXPECT_LE(difference(full(module->parameters()[0]), torch::full({8}, 0.9)), 1e-7)
            << "variant " << variant;
        EXPECT_LE(difference(module->forward(x), torch::full({8}, 0.9)), 1e-7)
            << "variant " << variant;
      }
    });
  }
}

TEST(ModelUsedBeforeOptimizer, AnOptimizerFromBeforeTheWrapSaysSo) {
  on_ranks(2, [](int) {
    for (bool adagrad : {false, true}) {
      Scale module;
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (adagrad) {
        optimizer = std::make_unique<torch::optim::Adagrad>(module->parameters(), 0.1);
      } else {
        optimizer = std::make_unique<torch::optim::SGD>(module->parameters(), 0.1);
      }
      const std::string error = error_of([&] {
        fully_shard(module);
        module->forward(torch::ones({8})).sum().backward();
        optimizer->step();
      });
      EXPECT_THAT(error, HasSubstr("'param'"));
      EXPECT_THAT(error, HasSubstr("parameters()"));
      EXPECT_EQ(difference(full(module->parameters()[0]), torch::ones({8})), 0);
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::model_used_before_optimizer
