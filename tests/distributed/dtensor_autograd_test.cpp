// Gradients through DTensors, against those of whole tensors.
#include "support/ranks.h"
#include "support/tensors.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2 {
namespace {

using torch::Tensor;

/// Checks `loss` on whole leaves and on sharded ones; gradients must come as DTensors in the leaf's
/// layout.
void compare(const char* name, const DeviceMesh& mesh, const Placements& placements,
             const std::function<Tensor(const std::vector<Tensor>&)>& loss, int passes = 1) {
  torch::manual_seed(4);
  std::vector<Tensor> whole, parts;
  for (const auto& size : std::vector<std::vector<int64_t>>{{7, 3}, {5, 2}, {1, 3}}) {
    const Tensor value = torch::randn(size);
    whole.push_back(value.clone().requires_grad_());
    parts.push_back(chunk_tensor(value, mesh, placements).requires_grad_());
  }
  for (int pass = 0; pass < passes; ++pass) {
    const Tensor expected = loss(whole);
    Tensor result = loss(parts);
    expected.backward();
    result.backward();
    EXPECT_NEAR(result.item<float>(), expected.item<float>(), 1e-4) << name;
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    ASSERT_EQ(parts[i].grad().defined(), whole[i].grad().defined()) << name;
    if (!whole[i].grad().defined()) continue;
    ASSERT_TRUE(is_dtensor(parts[i].grad())) << name << " " << i;
    const DTensor grad(parts[i].grad());
    EXPECT_EQ(grad.placements(), placements) << name;
    EXPECT_TRUE(torch::allclose(grad.full_tensor(), whole[i].grad(), 1e-5, 1e-6))
        << name << " " << i;
    torch::NoGradGuard no_grad;
    parts[i].grad().mul_(2);  // memory of its own
  }
}

std::vector<std::pair<const char*, std::function<Tensor(const std::vector<Tensor>&)>>> losses() {
  return {
      {"sum of squares",
       [](const auto& p) {
         Tensor sum = (p[0] * p[0]).sum();
         for (size_t i = 1; i < p.size(); ++i) sum = sum + p[i].pow(2).sum();
         return sum;
       }},
      {"norms", [](const auto& p) { return p[0].norm() + p[1].norm(1) + 0.5 * p[2].norm(); }},
      {"a plain loss and a penalty",
       [](const auto& p) {
         const Tensor input = torch::ones({3}).requires_grad_();
         const Tensor data = input.pow(2).sum();
         Tensor loss = data + 0.01 * p[0].pow(2).sum();
         loss = loss + p[1].norm() * torch::tensor(0.5);
         return loss;
       }},
      {"bare sum", [](const auto& p) { return p[0].sum() + p[1].sum(0).sum(); }},
      {"bare mean", [](const auto& p) { return p[0].mean() * 3; }},
      {"mean of squares", [](const auto& p) { return p[0].square().mean() + p[2].abs().mean(); }},
      {"pointwise chain",
       [](const auto& p) { return (torch::tanh(p[0]) * p[0].exp() + p[2]).pow(2).sum(); }},
      {"distance to a target",
       [](const auto& p) { return (p[0] - torch::ones_like(p[0])).pow(2).sum(); }},
      {"norm as a factor", [](const auto& p) { return (p[0] * p[0].norm()).sum(); }},
      {"views",
       [](const auto& p) { return (p[0].t() * p[0].t().exp()).sum() + p[1].view({5, 2}).sum(); }},
      {"stacked norms",
       [](const auto& p) { return torch::stack({p[0].norm(), p[1].norm(), p[2].norm()}).norm(); }},
      {"gathered",
       [](const auto& p) {
         return testing::whole_of(p[0]).matmul(testing::whole_of(p[2]).t()).pow(2).sum();
       }},
      {"redistributed",
       [](const auto& p) {
         const auto moved = [](const Tensor& t) -> Tensor {
           if (!is_dtensor(t)) return t;
           return DTensor(t).redistribute(Placements(DTensor(t).placements().size(), Shard(1)));
         };
         return (moved(p[0]) * moved(p[0]).exp()).sum() + moved(p[1]).sum();
       }},
  };
}

TEST(Autograd, GradientsAreGlobal) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (const auto& [name, loss] : losses()) {
        compare(name, mesh, {Shard(0)}, loss);
        compare(name, mesh, {Replicate()}, loss, 2);
      }
    });
  }
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    for (const auto& [name, loss] : losses()) {
      compare(name, mesh, {Replicate(), Shard(0)}, loss, 2);
      compare(name, mesh, {Shard(0), Shard(0)}, loss);
    }
  });
}

TEST(Autograd, CrossingToLocalAndBack) {
  testing::on_ranks(3, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor parameter = chunk_tensor(torch::ones({7, 2}), mesh, {Shard(0)}).requires_grad_();
    (DTensor(parameter).to_local() * (rank + 1)).sum().backward();
    ASSERT_TRUE(is_dtensor(parameter.grad()));
    EXPECT_EQ(DTensor(parameter.grad()).placements(), Placements{Shard(0)});
    EXPECT_EQ(DTensor(parameter.grad()).full_tensor().sum().item<float>(),
              2 * (3 * 1 + 3 * 2 + 1 * 3));

    Tensor local = torch::full({rank < 2 ? 3 : 1, 2}, 2.0f).requires_grad_();
    (DTensor::from_local(local, mesh, {Shard(0)}) * 3).pow(2).sum().backward();
    EXPECT_FALSE(is_dtensor(local.grad()));
    EXPECT_TRUE(torch::equal(local.grad(), torch::full(local.sizes(), 36.0f)));

    for (const auto& [op, expected] :
         std::vector<std::pair<const char*, float>>{{"sum", 1.f}, {"avg", 1 / 3.f}}) {
      Tensor part = torch::ones({4}).requires_grad_();
      DTensor::from_local(part, mesh, {Partial(op)}).redistribute({Shard(0)}).sum().backward();
      EXPECT_TRUE(torch::allclose(part.grad(), torch::full({4}, expected))) << op;
    }
    Tensor part = torch::ones({4}).requires_grad_();
    EXPECT_THROW(DTensor::from_local(part, mesh, {Partial("max")}).full_tensor().sum().backward(),
                 c10::Error);
  });
}

TEST(Autograd, LeavesOfEveryOriginGetTheirOwnLayout) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor made = chunk_tensor(torch::ones({5}), mesh, {Shard(0)});
    for (const Tensor& leaf :
         {(made * 2).detach().requires_grad_(), torch::ones_like(made).requires_grad_(),
          made.clone().requires_grad_()}) {
      for (int pass = 0; pass < 2; ++pass) (leaf.sum() * 3).backward();
      ASSERT_TRUE(is_dtensor(leaf.grad()));
      EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Shard(0)});
      EXPECT_TRUE(torch::equal(DTensor(leaf.grad()).full_tensor(), torch::full({5}, 6.0f)));
    }
  });
}

TEST(Autograd, UserHooksSeeTheirLayout) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor leaf = chunk_tensor(torch::ones({5}), mesh, {Shard(0)}).requires_grad_();
    leaf.register_hook([](const Tensor& grad) { return grad * 2; });
    leaf.pow(2).sum().backward();
    EXPECT_TRUE(torch::equal(DTensor(leaf.grad()).full_tensor(), torch::full({5}, 4.0f)));
  });
}

TEST(Autograd, Twice) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor value = torch::randn({5, 2});
    const auto penalty = [](const Tensor& p, const std::function<Tensor(const Tensor&)>& f) {
      const Tensor grad = torch::autograd::grad({f(p)}, {p}, {}, true, true)[0];
      grad.pow(2).sum().backward();
      return p.grad();
    };
    torch::manual_seed(1);
    const Tensor whole = value.clone().requires_grad_();
    const Tensor parts = distribute_tensor(value, mesh, {Shard(0)}).requires_grad_();
    const Tensor first = DTensor(parts).full_tensor().detach().requires_grad_();
    const Tensor expected = penalty(first, [](const Tensor& p) { return p.pow(3).sum(); });
    EXPECT_TRUE(torch::allclose(
        DTensor(penalty(parts, [](const Tensor& p) { return p.pow(3).sum(); })).full_tensor(),
        expected));
    parts.mutable_grad().reset();
    EXPECT_TRUE(torch::allclose(
        DTensor(
            penalty(parts, [](const Tensor& p) { return DTensor(p).full_tensor().pow(3).sum(); }))
            .full_tensor(),
        expected));
  });
}

}  // namespace
}  // namespace fsdp2
