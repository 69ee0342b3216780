// Ops that mix elements of different ranks: matrix products, order, statistics, indexing. Values
// and gradients as of whole tensors.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/tensors.h"
#include "support/training.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace fsdp2::testing::whole_values {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::indexing::Slice;

/// Two of size [7, 4], a vector of 4, whole numbers of size [7, 4], and places 5, 0, 5.
struct Given {
  Tensor w, u, v, n, places;
};
struct Named {
  const char* name;
  std::function<Tensor(const Given&)> run;
};

Tensor eye_like(const Tensor& square) {
  Tensor out = torch::empty_like(square).detach();
  return torch::eye_out(out, square.size(0));
}

/// Not of floating point, or not differentiable.
std::vector<Named> values() {
  using G = Given;
  return {
      {"sort indices", [](const G& g) { return std::get<1>(g.w.sort(0)); }},
      {"sort other", [](const G& g) { return std::get<1>(g.w.sort(1, true)); }},
      {"argsort", [](const G& g) { return g.w.argsort(int64_t{0}); }},
      {"topk indices", [](const G& g) { return std::get<1>(g.w.topk(2, 0)); }},
      {"max indices", [](const G& g) { return std::get<1>(g.w.max(0)); }},
      {"argmax", [](const G& g) { return g.w.argmax(); }},
      {"argmax 0", [](const G& g) { return g.w.argmax(0); }},
      {"argmin 1", [](const G& g) { return g.w.argmin(1, true); }},
      {"median", [](const G& g) { return g.w.median(); }},
      {"kthvalue", [](const G& g) { return std::get<0>(g.w.kthvalue(2, 0)); }},
      {"cumsum of whole numbers", [](const G& g) { return g.n.cumsum(0); }},
      {"histc", [](const G& g) { return g.w.histc(5, -2, 2); }},
      {"bincount", [](const G& g) { return g.places.bincount(); }},
      {"nonzero", [](const G& g) { return (g.w > 0).nonzero(); }},
      {"masked_select", [](const G& g) { return g.w.masked_select(g.w > 0); }},
      {"by mask", [](const G& g) { return g.w.index({g.w > 0}); }},
      {"unique", [](const G& g) { return std::get<0>(at::_unique(g.n)); }},
      {"isin", [](const G& g) { return torch::isin(g.n, g.places); }},
      {"det", [](const G& g) { return torch::linalg_det(g.w.t().mm(g.w)); }},
      {"singular values", [](const G& g) { return torch::linalg_svdvals(g.w); }},
      {"spectral norm", [](const G& g) { return torch::linalg_matrix_norm(g.w, 2); }},
      {"nuclear norm", [](const G& g) { return torch::linalg_matrix_norm(g.w, "nuc"); }},
      {"frobenius", [](const G& g) { return torch::linalg_matrix_norm(g.w, "fro"); }},
      {"one norm", [](const G& g) { return torch::linalg_matrix_norm(g.w, 1); }},
      {"roll", [](const G& g) { return g.n.roll(2, 0); }},
      {"tril in place", [](const G& g) { return g.w.clone().tril_(); }},
      {"index_fill_", [](const G& g) { return g.w.clone().index_fill_(0, g.places, 3); }},
      {"index_add_",
       [](const G& g) { return g.w.clone().index_add_(0, g.places, g.w.slice(0, 0, 3)); }},
      {"index_put_", [](const G& g) { return g.w.clone().index_put_({g.w > 0}, g.w.max()); }},
      {"addmm_", [](const G& g) { return g.w.clone().addmm_(g.u, g.u.t().mm(g.w), 0.5, 2); }},
      {"mm_out",
       [](const G& g) {
         Tensor out = g.w.clone();
         torch::mm_out(out, g.u, g.u.t().mm(g.w));
         return out;
       }},
      {"masked_fill_", [](const G& g) { return g.w.clone().masked_fill_(g.w > 0, 7); }},
      {"clamp by tensors", [](const G& g) { return g.w.clamp(g.u - 1, g.u.abs()); }},
      {"quantile-free median", [](const G& g) { return std::get<0>(g.w.median(0)); }},
  };
}

/// Differentiable in w, u and v.
std::vector<Named> functions() {
  using G = Given;
  return {
      {"mm", [](const G& g) { return g.w.mm(g.u.t()); }},
      {"matmul", [](const G& g) { return torch::matmul(g.w.t(), g.u); }},
      {"matmul vector", [](const G& g) { return torch::matmul(g.w, g.v); }},
      {"matmul batched", [](const G& g) { return torch::matmul(g.w.unsqueeze(0), g.u.t()); }},
      {"mv", [](const G& g) { return g.w.mv(g.v); }},
      {"dot", [](const G& g) { return g.v.dot(g.v * 2); }},
      {"outer", [](const G& g) { return torch::outer(g.v, g.w.sum(1)); }},
      {"addmm", [](const G& g) { return torch::addmm(g.v, g.w, g.u.t().mm(g.u)); }},
      {"bmm",
       [](const G& g) { return torch::stack({g.w, g.u}).bmm(torch::stack({g.u.t(), g.w.t()})); }},
      {"linear", [](const G& g) { return torch::nn::functional::linear(g.u, g.w); }},
      {"linear with bias", [](const G& g) { return torch::linear(g.u, g.w.t().mm(g.u), g.v); }},
      {"einsum", [](const G& g) { return torch::einsum("ij,kj->ik", {g.w, g.u}); }},
      {"einsum trace", [](const G& g) { return torch::einsum("ij,ij->", {g.w, g.u}); }},
      {"orthogonality",
       [](const G& g) {
         const Tensor gram = g.w.t().mm(g.w);
         return (gram - eye_like(gram)).pow(2).sum();
       }},
      {"dist", [](const G& g) { return torch::dist(g.w, g.u) + torch::dist(g.w, g.u, 1); }},
      {"cosine", [](const G& g) { return torch::cosine_similarity(g.w, g.u, 1); }},
      {"cosine along 0", [](const G& g) { return torch::cosine_similarity(g.w, g.u, 0); }},
      {"cosine of all",
       [](const G& g) { return torch::cosine_similarity(g.w.flatten(), g.u.flatten(), 0); }},
      {"cdist", [](const G& g) { return torch::cdist(g.w, g.u); }},
      {"pairwise", [](const G& g) { return torch::pairwise_distance(g.w, g.u); }},
      {"mse", [](const G& g) { return torch::mse_loss(g.w, g.u.detach()); }},
      {"smooth l1", [](const G& g) { return torch::smooth_l1_loss(g.w, g.u.detach()); }},
      {"product", [](const G& g) { return (g.w * g.u).sum(); }},
      {"var", [](const G& g) { return g.w.var() + g.w.std() * 2; }},
      {"var 0", [](const G& g) { return g.w.var(0, /*unbiased=*/false); }},
      {"std 1", [](const G& g) { return g.w.std(torch::IntArrayRef{1}, true, true); }},
      {"var_mean", [](const G& g) { return std::get<1>(torch::var_mean(g.w, 0)); }},
      {"max 0", [](const G& g) { return std::get<0>(g.w.max(0)); }},
      {"min 1", [](const G& g) { return std::get<0>(g.w.min(1)); }},
      {"amax", [](const G& g) { return g.w.amax(0) + g.w.amax(); }},
      {"sort", [](const G& g) { return std::get<0>(g.w.sort(0)).pow(3); }},
      {"sort other", [](const G& g) { return std::get<0>(g.w.sort(1)).select(1, 0); }},
      {"topk", [](const G& g) { return std::get<0>(g.w.topk(3, 0)); }},
      {"topk other", [](const G& g) { return std::get<0>(g.w.topk(2, 1)); }},
      {"cumsum", [](const G& g) { return g.w.cumsum(0).pow(2); }},
      {"cumsum other", [](const G& g) { return g.w.cumsum(1).pow(2); }},
      {"softmax", [](const G& g) { return g.w.softmax(0).pow(2); }},
      {"log_softmax other", [](const G& g) { return g.w.log_softmax(1).pow(2); }},
      {"logsumexp", [](const G& g) { return g.w.logsumexp(0); }},
      {"prod", [](const G& g) { return g.w.prod() + g.w.prod(0).sum(); }},
      {"where", [](const G& g) { return torch::where(g.w > g.u, g.w, g.u * 2); }},
      {"masked_fill", [](const G& g) { return g.w.masked_fill(g.u > 0, 0.5).pow(2); }},
      {"clamp", [](const G& g) { return g.w.clamp(-0.5, 0.5).pow(2); }},
      {"row", [](const G& g) { return g.w[3] * g.v; }},
      {"element", [](const G& g) { return g.w[3][1] * g.w.index({5, 2}); }},
      {"slices", [](const G& g) { return g.w.slice(0, 2, 5) * g.u.index({Slice(1, 4)}); }},
      {"index_select", [](const G& g) { return g.w.index_select(0, g.places).pow(2); }},
      {"index", [](const G& g) { return g.w.index({g.places}).pow(2); }},
      {"embedding", [](const G& g) { return torch::embedding(g.w, g.places).pow(2); }},
      {"gather", [](const G& g) { return g.w.gather(0, g.places.unsqueeze(1)).pow(2); }},
      {"cat", [](const G& g) { return torch::cat({g.w, g.u}).pow(2); }},
      {"cat other", [](const G& g) { return torch::cat({g.w, g.u}, 1).pow(2); }},
      {"cat of flat", [](const G& g) { return torch::cat({g.w.view(-1), g.v}).pow(2); }},
      {"stack", [](const G& g) { return torch::stack({g.w[0], g.v, g.u.sum(0)}).pow(2); }},
      {"flip", [](const G& g) { return g.w.flip(0) * g.u; }},
      {"tril", [](const G& g) { return g.w.tril() + g.w.triu().pow(2); }},
      {"trace", [](const G& g) { return g.w.t().mm(g.u).trace(); }},
      {"repeat", [](const G& g) { return g.v.repeat({7, 1}) * g.w; }},
      {"logdet", [](const G& g) { return torch::logdet(g.w.t().mm(g.w)); }},
      {"inverse", [](const G& g) { return torch::inverse(g.w.t().mm(g.w)); }},
      {"solve", [](const G& g) { return torch::linalg_solve(g.w.t().mm(g.w), g.v); }},
      {"spectral", [](const G& g) { return torch::linalg_matrix_norm(g.w, 2); }},
      {"weight norm", [](const G& g) { return g.w / g.w.norm(2, 1, true) * g.u; }},
      {"group lasso",
       [](const G& g) { return g.w.pow(2).sum(1).sqrt().sum() + g.w.pow(2).sum(0).sqrt().sum(); }},
      {"penalties",
       [](const G& g) {
         return g.w.norm() + g.u.norm(1) + g.v.norm(3) + g.w.abs().max() + g.w.pow(2).mean();
       }},
  };
}

Given whole_given() {
  torch::manual_seed(11);
  Given given;
  given.w = torch::randn({7, 4});
  given.u = torch::randn({7, 4});
  given.v = torch::randn({4});
  given.n = torch::randint(0, 9, {7, 4});
  given.places = torch::tensor({5, 0, 5});
  return given;
}

void compare(const DeviceMesh& mesh, const Placements& w, const Placements& u) {
  const Given whole = whole_given();
  const Placements replicate(mesh.ndim(), Replicate());
  Placements first(mesh.ndim(), Replicate());
  first.back() = Shard(0);
  const auto parts_given = [&] {
    return Given{chunk_tensor(whole.w, mesh, w), chunk_tensor(whole.u, mesh, u),
                 chunk_tensor(whole.v, mesh, first), chunk_tensor(whole.n, mesh, w),
                 chunk_tensor(whole.places, mesh, replicate)};
  };
  const auto layout = to_string(w) + to_string(u);
  for (const Named& op : values()) {
    std::string failure;
    try {
      const Tensor expected = op.run(whole), result = op.run(parts_given());
      EXPECT_TRUE(is_dtensor(result)) << op.name;
      EXPECT_EQ(result.scalar_type(), expected.scalar_type()) << op.name;
      EXPECT_LE(difference(full(result), expected), 1e-5) << op.name << layout;
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
    EXPECT_EQ(failure, "") << op.name << layout;
  }
  for (const Named& op : functions()) {
    std::string failure;
    Given a = whole_given(), b = parts_given();
    try {
      for (Given* given : {&a, &b}) {
        for (Tensor* leaf : {&given->w, &given->u, &given->v}) leaf->requires_grad_();
      }
      const Tensor expected = op.run(a), result = op.run(b);
      EXPECT_LE(difference(full(result), expected), 1e-4) << op.name << layout;
      expected.sum().backward();
      result.sum().backward();
      for (auto [plain, part] : {std::pair{&a.w, &b.w}, {&a.u, &b.u}, {&a.v, &b.v}}) {
        if (!plain->grad().defined()) continue;
        EXPECT_TRUE(is_dtensor(part->grad())) << op.name << layout;
        if (!is_dtensor(part->grad())) continue;
        EXPECT_LE(difference(full(part->grad()), plain->grad()), 1e-3) << op.name << layout;
        EXPECT_EQ(DTensor(part->grad()).placements(), DTensor(*part).placements()) << op.name;
      }
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
    EXPECT_EQ(failure, "") << op.name << layout;
  }
}

class WholeValues : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, WholeValues, ::testing::Values(1, 2, 3, 4));

TEST_P(WholeValues, OfOneDimension) {
  const int world = GetParam();
  on_ranks(world, [&](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {world});
    compare(mesh, {Shard(0)}, {Shard(0)});
    compare(mesh, {Shard(1)}, {Shard(0)});
    compare(mesh, {Replicate()}, {Shard(0)});
  });
}

TEST(WholeValues, OfTwoDimensions) {
  on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    compare(mesh, {Shard(0), Shard(0)}, {Replicate(), Shard(0)});
    compare(mesh, {Shard(1), Shard(0)}, {Shard(0), Shard(1)});
  });
}

TEST(WholeValues, KeepTheLayoutOfWhatIsNotCut) {
  on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor parts = chunk_tensor(torch::randn({7, 4}), mesh, {Shard(0)});
    for (const Tensor& result :
         {parts.cumsum(1), std::get<0>(parts.sort(1)), std::get<1>(parts.topk(2, 1)),
          parts.softmax(1), parts.argmax(1), std::get<0>(parts.max(1))}) {
      EXPECT_EQ(DTensor(result).placements(), Placements{Shard(0)});
    }
    Tensor written = parts.clone();
    written.addmm_(parts, parts.t().mm(parts)).tril_();
    EXPECT_EQ(DTensor(written).placements(), Placements{Shard(0)});
    EXPECT_EQ(DTensor(parts.mm(parts.t())).placements(), Placements{Replicate()});
  });
}

TEST(WholeValues, PlainOperandsAreToSayThatTheyAreEqual) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor w = chunk_tensor(torch::ones({5, 4}), mesh, {Shard(0)}).requires_grad_();
    const Tensor x = torch::ones({3, 4});
    for (const auto& run : std::vector<std::function<void()>>{
             [&] { torch::linear(x, w); }, [&] { x.mm(w.t()); }, [&] { w.mv(torch::ones({4})); },
             [&] { w.index_select(0, torch::tensor({0, 3})); },
             [&] { w.index({torch::tensor({0, 3})}); }, [&] { w.detach().mm(x.t()); }}) {
      EXPECT_THAT(error_of(run),
                  AllOf(HasSubstr("aten::"), HasSubstr("plain tensor of size"),
                        HasSubstr("distribute_tensor(tensor, mesh, {Replicate()})")));
    }
    const DTensor same = distribute_tensor(x, mesh, {Replicate()});
    EXPECT_EQ(difference(full(torch::linear(same, w)), torch::full({3, 5}, 4.0)), 0);
    const Tensor one = torch::ones({1}).requires_grad_();
    EXPECT_THAT(error_of([&] { torch::linear(same, w.detach(), one); }),
                HasSubstr("requires grad"));
    Tensor plain = torch::zeros({5, 5});
    EXPECT_THAT(error_of([&] { plain.addmm_(w.detach(), w.detach().t()); }),
                HasSubstr("write to a plain tensor"));
    EXPECT_EQ(difference(plain, torch::zeros({5, 5})), 0);
    const DTensor other =
        chunk_tensor(torch::ones({4, 5}), init_device_mesh("cpu", {1, 2}), {Replicate(), Shard(0)});
    EXPECT_THAT(error_of([&] { torch::mm(w, other); }), HasSubstr("another mesh"));
    Tensor wrong = w.detach().clone();
    EXPECT_NE(error_of([&] { torch::mm_out(wrong, w.detach(), w.detach().t()); }), "");
    EXPECT_EQ(wrong.sizes(), w.sizes());
  });
}

/// What a user writes next to a plain loss.
TEST(WholeValues, PenaltiesNextToAPlainLoss) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      torch::manual_seed(3);
      const Tensor value = torch::randn({5, 3});
      Tensor w = value.clone().requires_grad_();
      Tensor part = chunk_tensor(value, mesh, {Shard(0)}).requires_grad_();
      Tensor x = torch::ones({3}).requires_grad_();
      for (const Tensor& p : {w, part}) {
        const Tensor gram = p.t().mm(p);
        const Tensor eye = eye_like(gram);
        Tensor loss = x.pow(2).sum() + 0.1 * (gram - eye).pow(2).sum();
        loss = loss + 0.01 * p.norm() + p[2].pow(2).mean() * x.sum();
        EXPECT_FALSE(is_dtensor(loss));
        loss.backward();
      }
      EXPECT_LE(difference(full(part.grad()), w.grad()), 1e-5);
    });
  }
}

/// Values swapped with a moving average, and back.
TEST(WholeValues, MovingAverageSwapsIn) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Tensor p = chunk_tensor(torch::ones({5, 2}), mesh, {Shard(0)}).requires_grad_();
      Tensor average = p.detach().clone();
      torch::NoGradGuard no_grad;
      p.add_(2);
      average.mul_(0.5).add_(p, 0.5);
      const Tensor kept = p.detach().clone();
      p.data().copy_(average);
      EXPECT_EQ(difference(full(p), torch::full({5, 2}, 2.0)), 0);
      p.copy_(kept);
      EXPECT_EQ(difference(full(p), torch::full({5, 2}, 3.0)), 0);
      p.set_data(average.clone());
      EXPECT_EQ(difference(full(p), torch::full({5, 2}, 2.0)), 0);
      p.set_data(torch::full({5, 2}, 4.0f));
      EXPECT_EQ(difference(full(p), torch::full({5, 2}, 4.0)), 0);
      EXPECT_EQ(DTensor(p).placements(), Placements{Shard(0)});
      average.lerp_(p, 0.25);
      EXPECT_EQ(difference(full(average), torch::full({5, 2}, 2.5)), 0);
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing::whole_values
