// Reductions over shards, and what is built of them: gradient clipping.
#include "support/ranks.h"
#include "support/tensors.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

namespace fsdp2 {
namespace {

using testing::whole_of;
using torch::Tensor;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Reduction {
  const char* name;
  std::function<Tensor(const Tensor&)> run;
};

std::vector<Reduction> reductions() {
  std::vector<Reduction> all = {
      {"sum", [](const Tensor& t) { return t.sum(); }},
      {"sum dtype", [](const Tensor& t) { return t.sum(torch::kDouble); }},
      {"sum 0", [](const Tensor& t) { return t.sum(0); }},
      {"sum 1 keep", [](const Tensor& t) { return t.sum(1, true); }},
      {"sum 0 1", [](const Tensor& t) { return t.sum(torch::IntArrayRef{0, 1}); }},
      {"mean", [](const Tensor& t) { return t.mean(); }},
      {"mean 0", [](const Tensor& t) { return t.mean(0); }},
      {"mean 1", [](const Tensor& t) { return t.mean(-1, true); }},
      {"max", [](const Tensor& t) { return t.max(); }},
      {"min", [](const Tensor& t) { return t.min(); }},
      {"amax 0", [](const Tensor& t) { return t.amax(0); }},
      {"amin 1", [](const Tensor& t) { return t.amin(1, true); }},
      {"prod", [](const Tensor& t) { return t.prod(); }},
      {"any", [](const Tensor& t) { return (t > 1).any(); }},
      {"all", [](const Tensor& t) { return (t < 1).all(); }},
      {"all true", [](const Tensor& t) { return (t < 100).all(); }},
      {"any 0", [](const Tensor& t) { return (t > 1).any(0); }},
      {"isfinite all", [](const Tensor& t) { return torch::isfinite(t).all(); }},
      {"count_nonzero", [](const Tensor& t) { return t.relu().count_nonzero(); }},
      {"norm", [](const Tensor& t) { return t.norm(); }},
      {"norm 0 keep", [](const Tensor& t) { return t.norm(2, torch::IntArrayRef{0}, true); }},
      {"norm dtype", [](const Tensor& t) { return t.norm(3, torch::kDouble); }},
      {"inf by hand", [](const Tensor& t) { return t.abs().max(); }},
      {"of a sum", [](const Tensor& t) { return (t.sum(0) * 2 + t.sum(0)).norm(); }},
      {"sum of a Partial", [](const Tensor& t) { return t.sum(0).sum(); }},
      {"mean of a Partial", [](const Tensor& t) { return t.mean(0).mean(); }},
      {"stacked", [](const Tensor& t) { return torch::stack({t.norm(), t.norm()}).norm(); }},
      {"arithmetic", [](const Tensor& t) { return -(t.sum() - t.mean() * 3) / 2 + 1; }},
  };
  for (double order : {0.0, 0.5, 1.0, 2.0, 3.0, -1.0, kInfinity, -kInfinity}) {
    all.push_back({"norm of an order", [order](const Tensor& t) { return t.norm(order); }});
    all.push_back({"linalg norm of an order",
                   [order](const Tensor& t) { return torch::linalg_vector_norm(t, order); }});
    all.push_back({"linalg norm along 0", [order](const Tensor& t) {
                     return torch::linalg_vector_norm(t, order, torch::IntArrayRef{0});
                   }});
  }
  return all;
}

void compare(const Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  const DTensor sharded = chunk_tensor(whole, mesh, placements);
  for (const Reduction& reduction : reductions()) {
    const Tensor expected = reduction.run(whole);
    const Tensor result = reduction.run(sharded);
    EXPECT_EQ(result.sizes(), expected.sizes()) << reduction.name;
    EXPECT_EQ(result.scalar_type(), expected.scalar_type()) << reduction.name;
    const Tensor value = whole_of(result);
    EXPECT_TRUE(torch::allclose(value, expected, 1e-5, 1e-6, true))
        << reduction.name << " of " << whole.sizes() << " as " << to_string(placements) << ": "
        << value << " is not " << expected;
    if (mesh.size() == 1) {
      EXPECT_TRUE(torch::equal(value, expected)) << reduction.name << " in one process";
    }
  }
}

TEST(Reductions, EqualTheWholeTensors) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      torch::manual_seed(1);
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (const Tensor& whole :
           {torch::randn({7, 3}), torch::randn({1, 4}), torch::randn({5, 2}) - 9}) {
        compare(whole, mesh, {Shard(0)});
        compare(whole, mesh, {Shard(1)});
        compare(whole, mesh, {Replicate()});
      }
    });
  }
}

TEST(Reductions, EqualTheWholeTensorsOnTwoDimensions) {
  testing::on_ranks(4, [](int) {
    torch::manual_seed(1);
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    for (const Tensor& whole : {torch::randn({7, 3}), torch::randn({1, 4})}) {
      compare(whole, mesh, {Replicate(), Shard(0)});
      compare(whole, mesh, {Shard(0), Shard(0)});
      compare(whole, mesh, {Shard(1), Shard(0)});
      compare(whole, mesh, {Shard(0), Replicate()});
    }
  });
}

TEST(Reductions, MeanCountsElementsNotRanks) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor three = torch::arange(12).view({3, 4}).to(torch::kFloat);
    EXPECT_EQ(chunk_tensor(three, mesh, {Shard(0)}).mean().item<float>(), 5.5f);
    const Tensor one = torch::arange(4).view({1, 4}).to(torch::kFloat);
    EXPECT_EQ(chunk_tensor(one, mesh, {Shard(0)}).mean().item<float>(), 1.5f);
  });
}

TEST(Reductions, NanAndIntegersSurvive) {
  for (int world : {2, 3}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (int at : {0, 4}) {
        Tensor whole = torch::arange(5).to(torch::kFloat);
        whole[at] = std::nan("");
        const DTensor sharded = chunk_tensor(whole, mesh, {Shard(0)});
        EXPECT_TRUE(std::isnan(sharded.max().item<float>()));
        EXPECT_TRUE(std::isnan(sharded.abs().max().item<float>()));
        EXPECT_TRUE(std::isnan(sharded.norm().item<float>()));
        EXPECT_TRUE(sharded.isnan().any().item<bool>());
      }
      const DTensor integers = chunk_tensor(torch::arange(1, 6), mesh, {Shard(0)});
      EXPECT_EQ(integers.sum().item<int64_t>(), 15);
      EXPECT_EQ(integers.max().item<int64_t>(), 5);
      EXPECT_EQ(chunk_tensor(torch::full({1}, -7), mesh, {Shard(0)}).max().item<int64_t>(), -7);
      EXPECT_THROW(integers.mean(), c10::Error);
    });
  }
}

TEST(Reductions, WaitForTheFirstUse) {
  testing::on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const DTensor sharded = chunk_tensor(torch::ones({7}), mesh, {Shard(0)});
    reset_collective_counts();
    const DTensor sum(sharded.sum() * 2 + sharded.sum());
    EXPECT_EQ(sum.placements(), Placements{Partial()});
    EXPECT_EQ(DTensor(sharded.norm()).placements(), Placements{PartialNorm(2)});
    EXPECT_EQ(DTensor(sharded.max()).placements(), Placements{Partial("max")});
    EXPECT_EQ(collective_counts().all_reduces, 0);
    EXPECT_EQ(sum.item<float>(), 21);
    EXPECT_EQ(sum.item<float>(), 21);
    EXPECT_EQ((sum + 1).item<float>(), 22);
    EXPECT_EQ(collective_counts().all_reduces, 1);
  });
}

// a[9] and b[16] of ones over the layouts that `make` gives them.
using Make = std::function<std::vector<Tensor>(const Tensor& a, const Tensor& b)>;

void clip(const Make& make) {
  const auto fresh = [&] {
    std::vector<Tensor> parameters = make(torch::zeros({9}), torch::zeros({16}));
    const std::vector<Tensor> grads = make(torch::ones({9}), torch::ones({16}));
    for (size_t i = 0; i < grads.size(); ++i) {
      parameters[i].requires_grad_();
      parameters[i].mutable_grad() = grads[i];
    }
    return parameters;
  };
  const std::vector<std::pair<double, double>> norms = {
      {1, 25}, {2, 5}, {3, 2.924018}, {kInfinity, 1}};
  for (const auto& [order, expected] : norms) {
    auto parameters = fresh();
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(parameters, 30, order), expected, 1e-5) << order;
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(parameters, 100, order, true), expected, 1e-5);
    for (const Tensor& parameter : parameters) {
      EXPECT_TRUE(torch::equal(whole_of(parameter.grad()), torch::ones(parameter.sizes())));
    }
  }
  auto parameters = fresh();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(parameters, 1.0), 5, 1e-6);
  for (const Tensor& parameter : parameters) {
    EXPECT_TRUE(
        torch::allclose(whole_of(parameter.grad()), torch::full(parameter.sizes(), 0.2), 0, 1e-6));
  }
  parameters[1].mutable_grad().reset();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(parameters, 10.0), 0.6, 1e-6);
  parameters[0].mutable_grad().reset();
  EXPECT_EQ(torch::nn::utils::clip_grad_norm_(parameters, 10.0), 0);
  EXPECT_EQ(torch::nn::utils::clip_grad_norm_(std::vector<Tensor>(), 10.0), 0);
}

TEST(Clip, NormIsGlobalInEveryMesh) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      clip([&](const Tensor& a, const Tensor& b) -> std::vector<Tensor> {
        return {chunk_tensor(a, mesh, {Shard(0)}), chunk_tensor(b, mesh, {Shard(0)})};
      });
    });
  }
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    clip([&](const Tensor& a, const Tensor& b) -> std::vector<Tensor> {
      return {chunk_tensor(a, mesh, {Replicate(), Shard(0)}),
              chunk_tensor(b, mesh, {Replicate(), Shard(0)})};
    });
    clip([&](const Tensor& a, const Tensor& b) -> std::vector<Tensor> {
      return {chunk_tensor(a, mesh["dp"], {Shard(0)}), chunk_tensor(b, mesh["tp"], {Shard(0)})};
    });
    clip([&](const Tensor& a, const Tensor& b) -> std::vector<Tensor> {
      return {chunk_tensor(a, mesh["dp"], {Shard(0)}), b.clone()};
    });
    clip([&](const Tensor& a, const Tensor& b) -> std::vector<Tensor> {
      return {chunk_tensor(a, mesh, {Shard(0), Shard(0)}),
              chunk_tensor(b, mesh, {Replicate(), Replicate()})};
    });
  });
}

TEST(Clip, CostsOneCollective) {
  for (int world : {2, 3}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (size_t count : {1, 5}) {
        std::vector<Tensor> parameters;
        for (size_t i = 0; i < count; ++i) {
          parameters.push_back(chunk_tensor(torch::zeros({7}), mesh, {Shard(0)}).requires_grad_());
          parameters.back().mutable_grad() = chunk_tensor(torch::ones({7}), mesh, {Shard(0)});
        }
        for (double order : {2.0, kInfinity}) {
          reset_collective_counts();
          torch::nn::utils::clip_grad_norm_(parameters, 1.0, order);
          const CollectiveCounts counts = collective_counts();
          EXPECT_EQ(counts.all_reduces, order == 2.0 ? 1 : 0);
          EXPECT_EQ(counts.all_gathers, order == 2.0 ? 0 : 1);
          EXPECT_EQ(counts.others + counts.broadcasts + counts.reduce_scatters, 0);
        }
      }
    });
  }
}

TEST(Clip, NormEqualsTheUnshardedOne) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      torch::manual_seed(3);
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      std::vector<Tensor> plain, sharded;
      for (int64_t rows : {70, 1, 33}) {
        const Tensor grad = torch::randn({rows, 50}) * rows;
        plain.push_back(torch::zeros_like(grad).requires_grad_());
        plain.back().mutable_grad() = grad.clone();
        sharded.push_back(chunk_tensor(torch::zeros_like(grad), mesh, {Shard(0)}).requires_grad_());
        sharded.back().mutable_grad() = chunk_tensor(grad, mesh, {Shard(0)});
      }
      const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.5);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(sharded, 0.5) / expected, 1, 2e-7);
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(torch::allclose(whole_of(sharded[i].grad()), plain[i].grad(), 1e-6, 0));
      }
      torch::nn::utils::clip_grad_value_(plain, 1e-3);
      torch::nn::utils::clip_grad_value_(sharded, 1e-3);
      EXPECT_TRUE(torch::allclose(whole_of(sharded[0].grad()), plain[0].grad(), 1e-6, 0));
    });
  }
}

}  // namespace
}  // namespace fsdp2
