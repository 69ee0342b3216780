// Random fills and torch::nn::init on shards: with one seed, the values of the whole tensor.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/training.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2::testing::dtensor_init {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using Fill = std::function<Tensor(Tensor)>;
namespace init = torch::nn::init;

struct Case {
  const char* name;
  Fill fill;
  std::vector<int64_t> size = {7, 5};
};

std::vector<Case> cases() {
  return {
      {"uniform_", [](Tensor t) { return t.uniform_(-1, 2); }},
      {"normal_", [](Tensor t) { return t.normal_(1, 2); }},
      {"normal_ of a few", [](Tensor t) { return t.normal_(); }, {3}},
      {"bernoulli_", [](Tensor t) { return t.bernoulli_(0.3); }},
      {"bernoulli_ by element", [](Tensor t) { return t.bernoulli_(torch::full_like(t, 0.3)); }},
      {"bernoulli", [](Tensor t) { return t.fill_(0.4).bernoulli(); }},
      {"random_", [](Tensor t) { return t.random_(); }},
      {"random_ range", [](Tensor t) { return t.random_(3, 9); }},
      {"random_ to", [](Tensor t) { return t.random_(5); }},
      {"exponential_", [](Tensor t) { return t.exponential_(2); }},
      {"geometric_", [](Tensor t) { return t.geometric_(0.4); }},
      {"cauchy_", [](Tensor t) { return t.cauchy_(); }},
      {"log_normal_", [](Tensor t) { return t.log_normal_(); }},
      {"rand_like", [](Tensor t) { return torch::rand_like(t); }},
      {"randn_like", [](Tensor t) { return torch::randn_like(t); }},
      {"randint_like", [](Tensor t) { return torch::randint_like(t, 10); }},
      {"randint_like low", [](Tensor t) { return torch::randint_like(t, 3, 10); }},
      {"rand_like double", [](Tensor t) { return torch::rand_like(t, torch::kDouble); }},
      {"of a transpose", [](Tensor t) { return t.t().normal_(); }},
      {"of a row", [](Tensor t) { return t[2].normal_(); }},
      {"twice", [](Tensor t) { return t.normal_() + torch::randn_like(t); }},
      {"dropout", [](Tensor t) { return torch::dropout(t.fill_(1), 0.5, true); }},
      {"multinomial", [](Tensor t) { return t.fill_(1).multinomial(3); }},
      {"poisson", [](Tensor t) { return torch::poisson(t.fill_(2)); }},
      {"normal of means", [](Tensor t) { return at::normal(t.fill_(2), 0.5); }},
      {"init uniform_", [](Tensor t) { return init::uniform_(t, -2, 2); }},
      {"init normal_", [](Tensor t) { return init::normal_(t, 0, 0.02); }},
      {"constant_", [](Tensor t) { return init::constant_(t, 3); }},
      {"ones_", [](Tensor t) { return init::ones_(t); }},
      {"zeros_", [](Tensor t) { return init::zeros_(t.fill_(1)); }},
      {"eye_", [](Tensor t) { return init::eye_(t); }},
      {"xavier_uniform_", [](Tensor t) { return init::xavier_uniform_(t, 2); }},
      {"xavier_normal_", [](Tensor t) { return init::xavier_normal_(t); }},
      {"kaiming_uniform_", [](Tensor t) { return init::kaiming_uniform_(t, std::sqrt(5)); }},
      {"kaiming_normal_", [](Tensor t) { return init::kaiming_normal_(t, 0, torch::kFanOut); }},
      {"kaiming of a filter", [](Tensor t) { return init::kaiming_normal_(t); }, {7, 2, 3, 3}},
      {"orthogonal_", [](Tensor t) { return init::orthogonal_(t); }},
      {"orthogonal_ wide", [](Tensor t) { return init::orthogonal_(t, 2); }, {5, 7}},
      {"orthogonal_ filter", [](Tensor t) { return init::orthogonal_(t); }, {7, 2, 3}},
      {"dirac_", [](Tensor t) { return init::dirac_(t.fill_(5)); }, {5, 3, 3}},
      {"dirac_ filter", [](Tensor t) { return init::dirac_(t); }, {3, 5, 3, 3}},
      {"truncated by hand",
       [](Tensor t) {  // as trunc_normal_ of the Python side does it
         return t.uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * std::sqrt(2.0)).clamp_(-0.04, 0.04);
       }},
  };
}

void compare(const DeviceMesh& mesh, const Placements& placements) {
  torch::NoGradGuard no_grad;
  for (const Case& each : cases()) {
    const Tensor whole = torch::zeros(each.size);
    const Tensor parts = chunk_tensor(whole, mesh, placements).requires_grad_();
    std::string failure;
    try {
      torch::manual_seed(11);
      const Tensor expected = each.fill(whole);
      const float whole_next = torch::rand({1}).item<float>();
      torch::manual_seed(11);
      const Tensor result = each.fill(parts);
      const float parts_next = torch::rand({1}).item<float>();
      EXPECT_EQ(difference(full(result), expected), 0) << each.name << to_string(placements);
      EXPECT_EQ(difference(full(parts), whole), 0) << each.name << to_string(placements);
      EXPECT_EQ(parts_next, whole_next) << each.name << ": the generator moved on differently";
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
    EXPECT_EQ(failure, "") << each.name << to_string(placements);
  }
}

TEST(Init, GivesTheValuesOfTheWhole) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      compare(mesh, {Shard(0)});
    });
  }
  on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    compare(mesh, {Replicate(), Shard(0)});
    compare(mesh, {Shard(0), Shard(0)});
  });
}

TEST(Init, OfTheSecondDimension) {
  on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    torch::NoGradGuard no_grad;
    for (const Case& each : cases()) {
      if (each.size.size() < 2) continue;
      const Tensor whole = torch::zeros(each.size);
      const Tensor parts = chunk_tensor(whole, mesh, {Shard(1)});
      torch::manual_seed(11);
      each.fill(whole);
      torch::manual_seed(11);
      each.fill(parts);
      EXPECT_EQ(difference(full(parts), whole), 0) << each.name;
    }
  });
}

TEST(Init, SparseIsRefusedByName) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor parts = chunk_tensor(torch::zeros({7, 5}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { init::sparse_(parts, 0.3); }),
                AllOf(HasSubstr("aten::"), HasSubstr("index_put_"), HasSubstr("full_tensor()")));
  });
}

}  // namespace
}  // namespace fsdp2::testing::dtensor_init
