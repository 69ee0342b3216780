// pytorch#174829: the loss depends on a tensor that forward kept in a member, not on what it
// returned.

#include "support/ranks.h"
#include "support/training.h"

namespace fsdp2::testing {
namespace {

using torch::Tensor;

struct KeeperImpl : torch::nn::Module {
  torch::nn::Linear lin1{nullptr}, lin2{nullptr};
  Tensor hidden;
  KeeperImpl() {
    lin1 = register_module("lin1", torch::nn::Linear(4, 4));
    lin2 = register_module("lin2", torch::nn::Linear(4, 4));
  }
  Tensor forward(Tensor x) {
    hidden = lin1(x);
    return lin2(hidden);
  }
};
TORCH_MODULE(Keeper);

TEST(LossFromHiddenMember, ReducesWhatWasUsedAndLeavesNothingBehind) {
  for (bool nested : {false, true}) {
    on_ranks(2, [&](int rank) {
      torch::manual_seed(1);
      Keeper plain, module;
      copy_values(*module, *plain);
      FullyShardOptions options;
      options.reshard_after_forward = true;
      if (nested) {
        fully_shard(module->lin1, options);
        fully_shard(module->lin2, options);
      }
      fully_shard(module, options);
      module->forward(torch::full({2, 4}, rank + 1.0));
      module->hidden.sum().backward();
      auto parameters = module->named_parameters();
      EXPECT_LE(difference(full(parameters["lin1.weight"].grad()), torch::full({4, 4}, 3.0)), 1e-6);
      EXPECT_LE(difference(full(parameters["lin1.bias"].grad()), torch::full({4}, 2.0)), 1e-6);
      EXPECT_FALSE(parameters["lin2.weight"].grad().defined());
      EXPECT_FALSE(parameters["lin2.bias"].grad().defined());
      EXPECT_THROW(module->lin1->weight.data_ptr(), c10::Error) << "not sharded again";
      EXPECT_THROW(module->lin2->weight.data_ptr(), c10::Error) << "not sharded again";

      module->zero_grad();
      module->forward(torch::full({2, 4}, rank + 1.0)).sum().backward();
      ((plain->forward(torch::full({2, 4}, 1.0)).sum() +
        plain->forward(torch::full({2, 4}, 2.0)).sum()) /
       2)
          .backward();
      expect_same_module(*module, *plain, 1e-6);
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing
