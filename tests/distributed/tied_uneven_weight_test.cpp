// pytorch#176076: embedding and head share a weight whose rows do not divide by the ranks, and the
// last rank's rows never change.

#include "support/ranks.h"
#include "support/training.h"

namespace fsdp2::testing {
namespace {

using torch::Tensor;

struct EmbedImpl : torch::nn::Module {
  Tensor weight;
  Tensor forward(const Tensor& ids) { return torch::embedding(weight, ids); }
};
struct HeadImpl : torch::nn::Module {
  Tensor weight;
  Tensor forward(const Tensor& h) { return torch::linear(h, weight); }
};
struct TiedImpl : torch::nn::Module {
  std::shared_ptr<EmbedImpl> embed = std::make_shared<EmbedImpl>();
  std::shared_ptr<HeadImpl> head = std::make_shared<HeadImpl>();
  TiedImpl() {
    register_module("embed", embed);
    register_module("head", head);
    Tensor rows = torch::arange(1, 6).view({5, 1}).expand({5, 4}) * 0.1;
    embed->weight = embed->register_parameter("weight", rows.clone());
    head->weight = head->register_parameter("weight", embed->weight);
  }
  Tensor loss(const Tensor& ids) { return head->forward(embed->forward(ids)).sum(); }
};

using Wrap = std::function<void(TiedImpl&)>;

void wrap_together(TiedImpl& m) {
  fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{m.embed, m.head});
}
void wrap_apart(TiedImpl& m) {
  fully_shard(std::static_pointer_cast<torch::nn::Module>(m.embed));
  fully_shard(std::static_pointer_cast<torch::nn::Module>(m.head));
}

class TiedUnevenWeight : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, TiedUnevenWeight, ::testing::Values(1, 2, 3, 4));

TEST_P(TiedUnevenWeight, EveryRowLearns) {
  for (const Wrap& wrap : {Wrap(wrap_together), Wrap(wrap_apart)}) {
    on_ranks(GetParam(), [&](int) {
      auto module = std::make_shared<TiedImpl>();
      wrap(*module);
      fully_shard(module);
      EXPECT_TRUE(module->embed->named_parameters()["weight"].is_same(
          module->head->named_parameters()["weight"]));
      const Tensor shared = module->embed->named_parameters()["weight"];
      torch::optim::SGD optimizer({shared}, 0.1);
      const Tensor ids = torch::arange(5);
      Tensor loss = module->loss(ids);
      EXPECT_NEAR(loss.item<double>(), 9.0, 1e-5);
      loss.backward();
      EXPECT_LE(difference(full(shared.grad()), torch::full({5, 4}, 3.0)), 1e-5);
      optimizer.step();
      const Tensor rows = torch::arange(-2, 3).view({5, 1}).expand({5, 4}) * 0.1;
      EXPECT_LE(difference(full(shared), rows), 1e-6);
      optimizer.zero_grad();
      EXPECT_NEAR(module->loss(ids).item<double>(), 0.0, 1e-5);
    });
  }
}

TEST_P(TiedUnevenWeight, DifferentIdsOnEachRank) {
  for (const Wrap& wrap : {Wrap(wrap_together), Wrap(wrap_apart)}) {
    on_ranks(GetParam(), [&](int rank) {
      auto plain = std::make_shared<TiedImpl>();
      auto module = std::make_shared<TiedImpl>();
      wrap(*module);
      fully_shard(module);
      Tensor expected;
      for (int r = 0; r < GetParam(); ++r) {
        Tensor part = plain->loss(torch::tensor({r % 5, (2 * r + 1) % 5}));
        expected = expected.defined() ? expected + part : part;
      }
      (expected / GetParam()).backward();
      module->loss(torch::tensor({rank % 5, (2 * rank + 1) % 5})).backward();
      EXPECT_LE(difference(full(module->embed->named_parameters()["weight"].grad()),
                           plain->embed->weight.grad()),
                1e-6);
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing
